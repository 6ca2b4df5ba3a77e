// Determines, by one trial, whether payloads can be copied between the GPUs of a link's two ends,
// or within one GPU.
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
  int ordinal = -1;                   // device's number; negative if payloads are in host memory
  std::string library = kDriverName;  // another library only in tests
  std::string refusal;                // reason why this end refuses a path, or empty
  unsigned slots = 0;                 // per direction
  std::size_t slot_bytes = 0;
  std::uint64_t job = 0;
  int rank = -1;
};

// The resources that both directions need.
struct Path {
  std::shared_ptr<const Context> context;
  Arena arena;  // memory for incoming payloads
  PeerArena peer;
  Stream stream;  // copies outgoing payloads
};

struct Agreement {
  std::optional<Path> path;
  std::string reason;  // reason why there is no path
};

// Determines whether the GPUs of both ends can write to each other's memory. Both ends must call it
// at the same time, with or without a device, and both get the same result. Each end sends the
// identity of its GPU, exports an arena, writes a pattern to the peer's arena and reads the peer's
// pattern from its own arena. If a device fails or does not respond within ten seconds, the result
// has no path, and its reason is the error. Throws the errors of the link if the peer is lost or
// the deadline passes.
Agreement agree(Link& link, const Wish& wish, const Deadline& deadline, const Tick& tick);

}  // namespace adaptive::cuda
