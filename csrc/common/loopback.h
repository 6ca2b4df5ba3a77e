// A channel from a process to itself, with the rules of the others: slots, credits, order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "common/channel.h"

namespace adaptive {

struct LoopbackOptions {
  std::size_t slot_bytes = std::size_t{1} << 20;
  unsigned slots = 8;  // messages that have arrived and were not given back
  std::uint64_t limit_bytes = std::uint64_t{4} << 30;
  // How many slots reserve() may have taken that the peer has not. A sender that takes them all
  // cannot send what comes first, while a receiver that holds the others waits for it.
  unsigned reservable = 64;
};

// Throws std::invalid_argument for options that cannot be.
std::unique_ptr<Sender> open_loopback(const Session& session, const LoopbackOptions& options);

}  // namespace adaptive
