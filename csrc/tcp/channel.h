// Channels over plain TCP, for nodes without RDMA: the rules of the other transports (slots,
// credits, order, names for failures) on a socket. Both directions of a pair share one connection.
#pragma once

#include <memory>

#include "common/channel.h"
#include "common/deadline.h"
#include "common/link.h"

namespace adaptive {

// Buffers of slot_bytes are kept and reused; memory cannot be reserved. A peer sends at least one
// heartbeat per second.
using TcpOptions = ChannelOptions;

// Opens both directions of the channel over `link`; both ends must call it at the same time and may
// have different options. Arrivals are put into session.completions. A payload of any size is
// received directly into its own buffer, so that memory is bounded by the slots and by the peer's
// payloads. Destroying the Sender closes both directions; leases stay valid. Throws
// std::invalid_argument, DeadlineError, SystemError, and Error for an incompatible peer.
std::unique_ptr<Sender> open_tcp(const Session& session, Link link, const TcpOptions& options,
                                 const Deadline& deadline, const Tick& tick);

}  // namespace adaptive
