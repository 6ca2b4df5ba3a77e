// The data that two processes exchange to connect their queue pairs, and the 32-bit immediate value
// of every message. docs/reference/transport.md describes the bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "common/channel.h"
#include "common/mapped_region.h"

namespace adaptive::rdma {

constexpr unsigned kMostLanes = 16;
constexpr std::size_t kHeaderBytes = sizeof(Message);

// Two queue pairs, one for this end's outgoing and one for its incoming messages; encoded little
// endian. All lanes of a channel share its slots. Each lane has its own keys, because lanes may be
// on different devices.
struct Lane {
  std::uint32_t qp_out = 0;   // queue pair that sends messages and receives credits
  std::uint32_t qp_in = 0;    // queue pair that receives messages and sends credits
  std::uint32_t psn_out = 0;  // first packet sequence numbers of the two, 24 bits
  std::uint32_t psn_in = 0;
  std::uint32_t arena_key = 0;  // remote keys of this end's slots and of its credit word
  std::uint32_t credit_key = 0;
  std::uint16_t lid = 0;
  std::uint8_t mtu = 0;         // 1 for 256 bytes to 5 for 4096, as in the InfiniBand headers
  std::uint8_t link_layer = 0;  // 1 InfiniBand, 2 Ethernet
  std::uint32_t zero = 0;
  std::array<std::uint8_t, 16> gid{};
  std::array<std::uint8_t, 16> more_zero{};
};

// The data that a peer needs to connect to one end of a channel.
struct EndpointRecord {
  std::uint64_t job = 0;
  std::uint64_t slot_bytes = 0;      // largest payload of one slot
  std::uint64_t stride_bytes = 0;    // distance between slots
  std::uint64_t arena_address = 0;   // slot 0
  std::uint64_t credit_address = 0;  // the 8 bytes that are written when slots are free again
  std::uint32_t slots = 0;
  std::vector<Lane> lanes;
};

std::vector<std::uint8_t> encode(const EndpointRecord& record);

// Throws Error with `peer` if the bytes are not an endpoint, contradict themselves, or contain the
// reason why the peer gave up (see encode_refusal).
EndpointRecord decode_endpoint(const std::vector<std::uint8_t>& bytes, int peer);

// Encodes the reason that an end sends instead of an endpoint if it cannot open the channel.
std::vector<std::uint8_t> encode_refusal(const std::string& reason);

// Encodes the record that an end sends once its queue pairs are connected. No message is written
// before the peer's record has been received.
std::vector<std::uint8_t> encode_ready();
void decode_ready(const std::vector<std::uint8_t>& bytes, int peer);

constexpr std::size_t kLargestRecordBytes = 64 + 64 * kMostLanes;

// The immediate value of a message, before it is put into network byte order.
//
//   31                      8   7         6        5       0
//  | number of the write     | control | urgent | slot       |
//
// `number` counts the channel's writes with immediate, so that messages from several queue pairs
// can be put in order. `urgent` means that the sender has few slots left; see Haste::kUrgent.
struct Immediate {
  std::uint32_t number = 0;  // modulo 2^24
  bool control = false;      // without a slot; `slot` is a Control
  bool urgent = false;
  std::uint8_t slot = 0;
};

enum class Control : std::uint8_t {
  kGone = 0,   // the sender has closed its end
  kHurry = 1,  // the sender has no free slot, see Haste::kAtOnce
};

// How soon the sender needs the slots that the receiver has read. The last value applies until the
// sender writes a message that is not urgent. A packet for each returned slot would slow down a
// stream of messages, so one packet returns several slots if the sender still has free slots.
enum class Haste : std::uint8_t {
  kNone,  // when half of the slots can be returned
  // when a quarter can be returned, or immediately if at most half of the slots may be in flight
  kUrgent,
  kAtOnce,  // immediately: the sender may hold reserved slots, which the receiver cannot see
};

constexpr std::uint32_t kNumberMask = 0xff'ffff;

constexpr std::uint32_t pack(const Immediate& value) noexcept {
  return (value.number & kNumberMask) << 8 | (value.control ? 0x80U : 0U) |
         (value.urgent ? 0x40U : 0U) | (value.slot & 0x3fU);
}

constexpr Immediate unpack(std::uint32_t bits) noexcept {
  return {bits >> 8, (bits & 0x80U) != 0, (bits & 0x40U) != 0,
          static_cast<std::uint8_t>(bits & 0x3fU)};
}

// Slots begin at multiples of a page, so that two slots never share a page.
constexpr std::size_t stride_of(std::size_t slot_bytes) noexcept {
  constexpr std::size_t kPage = 4096;
  return round_up(kHeaderBytes + slot_bytes, kPage);
}

}  // namespace adaptive::rdma
