// Channels between processes of one node through memory that both map.
//
//   sender                                     receiver
//   send(): one copy into a slot ── entry ──>  wait(): a view of the slot, no copy
//   reserve(), commit(): none                  dropping the view gives the slot back
//
// See ring.h for the layout. The memory is anonymous and handed over with the link's descriptors:
// nothing of it outlives the processes, however they end.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "common/channel.h"
#include "common/deadline.h"
#include "common/link.h"
#include "cuda/driver.h"

namespace adaptive {

struct ShmOptions : ChannelOptions {
  // Of the abstract socket that processes take in turn while they make memory: random, and the same
  // in all of a job on this node. They make it at once where it is empty.
  std::string turn_name;
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
