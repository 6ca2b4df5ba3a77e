// Channels between nodes over RDMA verbs. The network card writes the peer's memory, so that a
// message involves neither the kernel nor the peer's processor.
//
//   sender                                         receiver
//   staging arena, K slots  ── write with imm ──>  arena, K slots of [Message | payload]
//   credit word (64 bits)   <── 8 bytes inline ──  one bit per slot, flipped when it is free again
// one queue pair per direction; the receives that the immediates consume have no data
//
// The bytes are in docs/reference/transport.md.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "common/channel.h"
#include "common/deadline.h"
#include "common/link.h"

namespace adaptive {

struct RdmaOptions : ChannelOptions {
  // Defaults of the options that are not set: the active device and port with the link's address,
  // its RoCE v2 GID, and the largest MTU that both ends support.
  std::string device;    // "mlx5_0"
  std::string near_pci;  // "0000:3b:00.0" of a GPU: chooses the device nearest to it
  int port = 0;
  int gid_index = -1;
  unsigned mtu_bytes = 0;
  unsigned num_qps = 1;  // queue pairs per direction, at most 16, which share the messages
  // A peer that does not answer is considered lost after 7 * 4.096 us * 2^ack_timeout; on some
  // devices, after up to four times as long. For 16, this is 1.9 s to 7.5 s.
  unsigned ack_timeout = 16;
};

// Opens both directions of the channel over `link`; both ends must call it at the same time with
// equal slots, slot_bytes and num_qps. Arrivals are put into session.completions. Destroying the
// Sender closes both directions. Throws Error with the problem and a remedy (no device, no active
// port, locked-memory limit), SystemError, DeadlineError.
std::unique_ptr<Sender> open_rdma(const Session& session, Link link, const RdmaOptions& options,
                                  const Deadline& deadline, const Tick& tick);

}  // namespace adaptive
