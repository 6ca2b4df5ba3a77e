// Channels over plain TCP, for nodes without RDMA. They follow the same rules as the other
// transports (slots, credits, order of messages, names of failures). Both directions between two
// processes share one connection.
#pragma once

#include <memory>

#include "common/channel.h"
#include "common/deadline.h"
#include "common/link.h"

namespace adaptive {

// Options of TCP channels. Buffers of slot_bytes are kept and reused, and memory cannot be
// reserved. A peer sends at least one heartbeat per second.
using TcpOptions = ChannelOptions;

// Opens both directions of the channel over `link`; both ends must call it at the same time and may
// have different options. Arrivals are put into session.completions. A payload of any size is
// received directly into its own buffer, so the memory in use is limited by the number of slots and
// the size of the peer's payloads. Destroying the Sender closes both directions; existing leases
// stay valid. Throws std::invalid_argument, DeadlineError, SystemError, and Error for an
// incompatible peer.
std::unique_ptr<Sender> open_tcp(const Session& session, Link link, const TcpOptions& options,
                                 const Deadline& deadline, const Tick& tick);

}  // namespace adaptive
