// How the two ends of a link find out whether payloads can go from one GPU's memory to the other's,
// or stay on one: by doing it once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "common/deadline.h"
#include "common/link.h"
#include "cuda/arena.h"

namespace adaptive::cuda {

struct Wish {
  int ordinal = -1;                   // of the device; negative: payloads are in host memory
  std::string library = kDriverName;  // another one only in tests
  std::string refusal;                // why not, should this end not want it
  unsigned slots = 0;                 // of either direction
  std::size_t slot_bytes = 0;
  std::uint64_t job = 0;
  int rank = -1;
};

// What both directions need.
struct Path {
  std::shared_ptr<const Context> context;
  Arena arena;  // for what comes in
  PeerArena peer;
  Stream stream;  // for copies out
};

struct Agreement {
  std::optional<Path> path;
  std::string reason;  // why there is none
};

// Both ends call it at the same time, also those without a device; both come to the same result.
// They tell each other which GPU they use, export an arena each, write a pattern to the other's and
// read their own. Whatever goes wrong with a device is a reason, and costs ten seconds at most.
// Throws what the link throws: the peer is gone, the deadline passed.
Agreement agree(Link& link, const Wish& wish, const Deadline& deadline, const Tick& tick);

}  // namespace adaptive::cuda
