// Channels between nodes over RDMA verbs: memory of the peer is written by the network card, and
// neither kernel nor peer's processor takes part in moving a message.
//
//   sender                                         receiver
//   staging arena, K slots  ── write with imm ──>  arena, K slots of [Message | payload]
//   credit word (64 bits)   <── 8 bytes inline ──  one bit per slot, flipped when it is free again
//   queue pair per direction; the receives that the immediates use up carry no data
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
  // What is not given is found: the device and port that are active and carry the link's address,
  // its RoCE v2 GID, the largest MTU that both ends have.
  std::string device;    // "mlx5_0"
  std::string near_pci;  // "0000:3b:00.0" of a GPU: the device with the shortest way to it
  int port = 0;
  int gid_index = -1;
  unsigned mtu_bytes = 0;
  unsigned num_qps = 1;  // queue pairs per direction that messages are spread over, at most 16
  // A peer that does not answer is lost after 7 times 4.096 us * 2^ack_timeout, and up to four
  // times that on some devices: 16 is 1.9 s to 7.5 s.
  unsigned ack_timeout = 16;
};

// Opens both directions of the pair at the ends of `link`; both ends call it at the same time with
// equal slots, slot_bytes and num_qps. Arrivals come to session.completions. Destroying the Sender
// ends both directions. Throws Error that says what is missing and how to mend it (no device, no
// active port, locked-memory limit), SystemError, DeadlineError.
std::unique_ptr<Sender> open_rdma(const Session& session, Link link, const RdmaOptions& options,
                                  const Deadline& deadline, const Tick& tick);

}  // namespace adaptive
