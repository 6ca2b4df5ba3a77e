// Channels between processes of one node through shared memory.
//
//   sender                                     receiver
//   send(): one copy into a slot ── entry ──>  wait(): a view of the slot, no copy
//   reserve(), commit(): none                  dropping the view gives the slot back
//
// See ring.h for the layout. The memory is anonymous, and its descriptors are sent over the link,
// so it is freed when the processes exit, even after a crash.
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
  // Name of an abstract socket that serves as a lock while a process allocates memory. The name is
  // random, and the same in all processes of a job on this node. If it is empty, no lock is used.
  std::string turn_name;
  // Number of the GPU whose memory contains the payloads of this process; negative if they are in
  // host memory. If the peer uses the same GPU or one that is reachable, payloads are copied
  // between the GPUs. Otherwise, the caller must copy them to the host. info() shows which case
  // applies.
  int cuda_device = -1;
  // reason why this end refuses a GPU path, or empty
  std::string cuda_refusal;
  std::string cuda_driver = cuda::kDriverName;  // tests use another library
};

// Opens both directions of the channel over `link`, a unix link; both ends must call it at the same
// time. Each end allocates slots times slot_bytes of memory for its outgoing direction. Arrivals
// are put into session.completions. Destroying the Sender closes both directions. If there is not
// enough memory, throws Error with the limit that was exceeded. Also throws SystemError and
// DeadlineError.
std::unique_ptr<Sender> open_shm(const Session& session, Link link, const ShmOptions& options,
                                 const Deadline& deadline, const Tick& tick);

}  // namespace adaptive
