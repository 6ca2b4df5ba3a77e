#include "rdma/wire.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "common/error.h"

namespace adaptive::rdma {
namespace {

constexpr std::uint32_t kEndpointMagic = 0x3150'5244;  // "DRP1" in memory order
constexpr std::uint32_t kRefusalMagic = 0x3158'5244;   // "DRX1"
constexpr std::uint32_t kReadyMagic = 0x3159'5244;     // "DRY1"
constexpr std::uint16_t kVersion = 1;
constexpr std::size_t kFixedBytes = 64;
constexpr std::size_t kLaneBytes = 64;
constexpr std::size_t kLongestRefusal = 900;
constexpr std::uint64_t kLargestSlotBytes = std::uint64_t{1} << 31;

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire format is little endian");

template <typename Value>
void put(std::vector<std::uint8_t>& bytes, std::size_t at, Value value) {
  static_assert(std::is_unsigned_v<Value>);
  std::memcpy(bytes.data() + at, &value, sizeof(value));
}

template <typename Value>
Value get(const std::vector<std::uint8_t>& bytes, std::size_t at) {
  static_assert(std::is_unsigned_v<Value>);
  Value value;
  std::memcpy(&value, bytes.data() + at, sizeof(value));
  return value;
}

void put_lane(std::vector<std::uint8_t>& bytes, std::size_t at, const Lane& lane) {
  put(bytes, at, lane.qp_out);
  put(bytes, at + 4, lane.qp_in);
  put(bytes, at + 8, lane.psn_out);
  put(bytes, at + 12, lane.psn_in);
  put(bytes, at + 16, lane.arena_key);
  put(bytes, at + 20, lane.credit_key);
  put(bytes, at + 24, lane.lid);
  put(bytes, at + 26, lane.mtu);
  put(bytes, at + 27, lane.link_layer);
  std::copy(lane.gid.begin(), lane.gid.end(), bytes.begin() + static_cast<std::ptrdiff_t>(at) + 32);
}

Lane get_lane(const std::vector<std::uint8_t>& bytes, std::size_t at) {
  Lane lane;
  lane.qp_out = get<std::uint32_t>(bytes, at);
  lane.qp_in = get<std::uint32_t>(bytes, at + 4);
  lane.psn_out = get<std::uint32_t>(bytes, at + 8);
  lane.psn_in = get<std::uint32_t>(bytes, at + 12);
  lane.arena_key = get<std::uint32_t>(bytes, at + 16);
  lane.credit_key = get<std::uint32_t>(bytes, at + 20);
  lane.lid = get<std::uint16_t>(bytes, at + 24);
  lane.mtu = get<std::uint8_t>(bytes, at + 26);
  lane.link_layer = get<std::uint8_t>(bytes, at + 27);
  std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(at) + 32, lane.gid.size(),
              lane.gid.begin());
  return lane;
}

std::uint32_t magic_of(const std::vector<std::uint8_t>& bytes) {
  return bytes.size() < sizeof(std::uint32_t) ? 0 : get<std::uint32_t>(bytes, 0);
}

std::string from(int peer) {
  return " from rank " + std::to_string(peer);
}

// The peer's own words, without what could disturb a terminal.
[[noreturn]] void throw_refusal(const std::vector<std::uint8_t>& bytes, int peer) {
  std::string reason(bytes.begin() + sizeof(std::uint32_t), bytes.end());
  for (char& letter : reason) {
    if (static_cast<unsigned char>(letter) < 0x20 || letter == 0x7f) {
      letter = ' ';
    }
  }
  throw Error("rank " + std::to_string(peer) + " cannot open an RDMA channel: " + reason);
}

void check_lane(const Lane& lane, int peer) {
  const bool numbers = lane.qp_out <= kNumberMask && lane.qp_in <= kNumberMask &&
                       lane.psn_out <= kNumberMask && lane.psn_in <= kNumberMask;
  if (!numbers || lane.mtu < 1 || lane.mtu > 5 || lane.link_layer < 1 || lane.link_layer > 2) {
    throw Error("the RDMA endpoint" + from(peer) + " has a lane with impossible numbers");
  }
}

}  // namespace

std::vector<std::uint8_t> encode(const EndpointRecord& record) {
  std::vector<std::uint8_t> bytes(kFixedBytes + kLaneBytes * record.lanes.size());
  put(bytes, 0, kEndpointMagic);
  put(bytes, 4, kVersion);
  put(bytes, 6, static_cast<std::uint16_t>(record.lanes.size()));
  put(bytes, 8, record.slots);
  put(bytes, 16, record.job);
  put(bytes, 24, record.slot_bytes);
  put(bytes, 32, record.stride_bytes);
  put(bytes, 40, record.arena_address);
  put(bytes, 48, record.credit_address);
  for (std::size_t i = 0; i < record.lanes.size(); ++i) {
    put_lane(bytes, kFixedBytes + kLaneBytes * i, record.lanes[i]);
  }
  return bytes;
}

EndpointRecord decode_endpoint(const std::vector<std::uint8_t>& bytes, int peer) {
  if (magic_of(bytes) == kRefusalMagic) {
    throw_refusal(bytes, peer);
  }
  if (magic_of(bytes) != kEndpointMagic || bytes.size() < kFixedBytes ||
      get<std::uint16_t>(bytes, 4) != kVersion) {
    throw Error("what came" + from(peer) +
                " is no RDMA endpoint of this version; do both ranks run the same version?");
  }
  const std::size_t num_lanes = get<std::uint16_t>(bytes, 6);
  EndpointRecord record;
  record.slots = get<std::uint32_t>(bytes, 8);
  record.job = get<std::uint64_t>(bytes, 16);
  record.slot_bytes = get<std::uint64_t>(bytes, 24);
  record.stride_bytes = get<std::uint64_t>(bytes, 32);
  record.arena_address = get<std::uint64_t>(bytes, 40);
  record.credit_address = get<std::uint64_t>(bytes, 48);
  const bool sane = num_lanes >= 1 && num_lanes <= kMostLanes &&
                    bytes.size() == kFixedBytes + kLaneBytes * num_lanes && record.slots >= 1 &&
                    record.slots <= kMostSlots && record.slot_bytes <= kLargestSlotBytes &&
                    record.stride_bytes >= record.slot_bytes + kHeaderBytes &&
                    record.stride_bytes <= 2 * kLargestSlotBytes &&
                    record.credit_address % sizeof(std::uint64_t) == 0;
  if (!sane) {
    throw Error("the RDMA endpoint" + from(peer) + " contradicts itself");
  }
  for (std::size_t i = 0; i < num_lanes; ++i) {
    record.lanes.push_back(get_lane(bytes, kFixedBytes + kLaneBytes * i));
    check_lane(record.lanes.back(), peer);
  }
  return record;
}

std::vector<std::uint8_t> encode_refusal(const std::string& reason) {
  const std::size_t length = std::min(reason.size(), kLongestRefusal);
  std::vector<std::uint8_t> bytes(sizeof(std::uint32_t) + length);
  put(bytes, 0, kRefusalMagic);
  std::memcpy(bytes.data() + sizeof(std::uint32_t), reason.data(), length);
  return bytes;
}

std::vector<std::uint8_t> encode_ready() {
  std::vector<std::uint8_t> bytes(sizeof(std::uint32_t));
  put(bytes, 0, kReadyMagic);
  return bytes;
}

void decode_ready(const std::vector<std::uint8_t>& bytes, int peer) {
  if (magic_of(bytes) == kRefusalMagic) {
    throw_refusal(bytes, peer);
  }
  if (magic_of(bytes) != kReadyMagic || bytes.size() != sizeof(std::uint32_t)) {
    throw Error("what came" + from(peer) + " is not the word that its queue pairs are ready");
  }
}

}  // namespace adaptive::rdma
