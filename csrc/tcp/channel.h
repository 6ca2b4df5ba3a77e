// Channels over plain TCP, for nodes without RDMA: the rules of the other transports (slots,
// credits, order, names for failures) on a socket. Both directions of a pair share one connection.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "common/channel.h"
#include "common/deadline.h"
#include "common/fd_passing.h"
#include "common/link.h"

namespace adaptive {

struct TcpOptions {
  std::size_t slot_bytes = std::size_t{1} << 20;  // buffers of this size are kept and used again
  unsigned slots = 16;  // messages that have arrived and were not given back; at most 64
  std::uint64_t limit_bytes = std::uint64_t{4} << 30;  // largest payload accepted
  bool crc = false;                                    // of what this end sends
  // A peer that is silent for so long is lost. It sends at least a heartbeat per second.
  std::chrono::milliseconds silent_limit{10'000};
};

// Opens both directions of the pair at the ends of `link`; both ends call it at the same time, with
// options of their own. Arrivals come to session.completions: a payload is received straight into a
// buffer of its own, whatever its size, so that memory is bounded by the slots and by the payloads
// that the peer sends. Destroying the Sender ends both directions; leases stay valid. Throws
// std::invalid_argument, DeadlineError, SystemError, Error for a peer with which it cannot be.
std::unique_ptr<Sender> open_tcp(const Session& session, Link link, const TcpOptions& options,
                                 const Deadline& deadline, const Tick& tick);

}  // namespace adaptive
