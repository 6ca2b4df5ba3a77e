// Channels over plain TCP, for nodes without RDMA: the rules of the other transports (slots,
// credits, order, names for failures) on a socket. Both directions of a pair share one connection.
#pragma once

#include <memory>

#include "common/channel.h"
#include "common/deadline.h"
#include "common/link.h"

namespace adaptive {

// Buffers of slot_bytes are kept and used again; there is no memory to reserve. A peer sends at
// least a heartbeat per second.
using TcpOptions = ChannelOptions;

// Opens both directions of the pair at the ends of `link`; both ends call it at the same time, with
// options of their own. Arrivals come to session.completions: a payload is received straight into a
// buffer of its own, whatever its size, so that memory is bounded by the slots and by the payloads
// that the peer sends. Destroying the Sender ends both directions; leases stay valid. Throws
// std::invalid_argument, DeadlineError, SystemError, Error for a peer with which it cannot be.
std::unique_ptr<Sender> open_tcp(const Session& session, Link link, const TcpOptions& options,
                                 const Deadline& deadline, const Tick& tick);

}  // namespace adaptive
