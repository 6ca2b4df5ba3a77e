// Channels between processes of one node through shared memory.
//
//   sender                                     receiver
//   send(): one copy into a slot ── entry ──>  wait(): a view of the slot, no copy
//   reserve(), commit(): none                  dropping the view gives the slot back
//
// See ring.h for the layout. The memory is anonymous, and its descriptors are sent over the link.
// So the memory is freed when the processes exit, even after a crash.
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
  // Name of the abstract socket that serves as a lock while a process allocates memory. It is
  // random and the same in all processes of a job on this node. If it is empty, there is no lock.
  std::string turn_name;
  // Number of the GPU with the payloads in this process; negative if payloads are in host memory.
  // If the peer's GPU is the same or reachable, payloads are copied between the GPUs; otherwise the
  // caller must copy them to the host. info() shows which case applies.
  int cuda_device = -1;
  // reason why this end does not want a GPU path, or empty
  std::string cuda_refusal;
  std::string cuda_driver = cuda::kDriverName;  // another library in tests
};

// Opens both directions of the channel over `link`, a unix link; both ends must call it at the same
// time. Each end allocates the memory of its outgoing direction, slots times slot_bytes. Arrivals
// are put into session.completions. Destroying the Sender closes both directions. Throws Error with
// the limit if there is not enough memory, SystemError, DeadlineError.
std::unique_ptr<Sender> open_shm(const Session& session, Link link, const ShmOptions& options,
                                 const Deadline& deadline, const Tick& tick);

}  // namespace adaptive
