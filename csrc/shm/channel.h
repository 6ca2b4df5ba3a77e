// Channels between processes of one node through memory that both map.
//
//   sender                                     receiver
//   send(): one copy into a slot ── entry ──>  wait(): a view of the slot, no copy
//   reserve(), commit(): none                  dropping the view gives the slot back
//
// See ring.h for the layout. The memory is anonymous and handed over with the link's descriptors:
// nothing of it outlives the processes, however they end.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "common/channel.h"
#include "common/deadline.h"
#include "common/fd_passing.h"
#include "common/link.h"
#include "cuda/driver.h"

namespace adaptive {

struct ShmOptions {
  std::size_t slot_bytes = std::size_t{4} << 20;
  unsigned slots = 8;                                  // at most 64
  std::uint64_t limit_bytes = std::uint64_t{4} << 30;  // largest payload accepted
  bool crc = false;
  std::chrono::milliseconds silent_limit{60'000};  // unused: the kernel tells of a process's end
  // Copies of this size and above bypass the caches; 0 for what the distance of the processors
  // suggests.
  std::size_t stream_from_bytes = 0;
  // How many slots reserve() may have taken that the peer has not. A sender that takes them all
  // cannot send what comes first, while a receiver that holds the others waits for it.
  unsigned reservable = 64;
  // Payloads in the memory of a GPU, by its number in this process; negative: there are none. Where
  // the peer's GPU is the same or can be reached they go from memory to memory, else the caller
  // brings them to the host; see info() for which it is.
  int cuda_device = -1;
  std::string cuda_refusal;                     // why not, should this end not want it
  std::string cuda_driver = cuda::kDriverName;  // another library in tests
};

// Opens both directions of the pair at the ends of `link`, a unix link; both ends call it at the
// same time. Each end makes the memory of its outgoing direction, slots times slot_bytes. Arrivals
// come to session.completions. Destroying the Sender ends both directions. Throws Error that names
// the limit where there is not enough memory, SystemError, DeadlineError.
std::unique_ptr<Sender> open_shm(const Session& session, Link link, const ShmOptions& options,
                                 const Deadline& deadline, const Tick& tick);

}  // namespace adaptive
