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
constexpr std::size_t kLongestRefusal = 900;
constexpr std::uint64_t kLargestRdmaSlotBytes = std::uint64_t{1} << 31;

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire format is little endian");

struct EndpointLayout {
  std::uint32_t magic;
  std::uint16_t version;
  std::uint16_t lanes;
  std::uint32_t slots;
  std::uint32_t zero;
  std::uint64_t job;
  std::uint64_t slot_bytes;
  std::uint64_t stride_bytes;
  std::uint64_t arena_address;
  std::uint64_t credit_address;
  std::uint64_t more_zero;
  // Lanes follow.
};
static_assert(sizeof(EndpointLayout) == 64 && sizeof(Lane) == 64 && offsetof(Lane, gid) == 32 &&
                  std::is_trivially_copyable_v<Lane>,
              "the layout is part of the wire format");

std::uint32_t magic_of(const std::vector<std::uint8_t>& bytes) {
  std::uint32_t magic = 0;
  if (bytes.size() >= sizeof(magic)) {
    std::memcpy(&magic, bytes.data(), sizeof(magic));
  }
  return magic;
}

// Encodes a record with a magic number and a text.
std::vector<std::uint8_t> tagged(std::uint32_t magic, const std::string& text) {
  std::vector<std::uint8_t> bytes(sizeof(magic) + text.size());
  std::memcpy(bytes.data(), &magic, sizeof(magic));
  std::copy(text.begin(), text.end(), bytes.begin() + sizeof(magic));
  return bytes;
}

std::string from(int peer) {
  return " from rank " + std::to_string(peer);
}

// Throws Error with the peer's own text, without characters that could affect a terminal.
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
  EndpointLayout fixed{};
  fixed.magic = kEndpointMagic;
  fixed.version = kVersion;
  fixed.lanes = static_cast<std::uint16_t>(record.lanes.size());
  fixed.slots = record.slots;
  fixed.job = record.job;
  fixed.slot_bytes = record.slot_bytes;
  fixed.stride_bytes = record.stride_bytes;
  fixed.arena_address = record.arena_address;
  fixed.credit_address = record.credit_address;
  const std::size_t lane_bytes = sizeof(Lane) * record.lanes.size();
  std::vector<std::uint8_t> bytes(sizeof(fixed) + lane_bytes);
  std::memcpy(bytes.data(), &fixed, sizeof(fixed));
  std::memcpy(bytes.data() + sizeof(fixed), record.lanes.data(), lane_bytes);
  return bytes;
}

EndpointRecord decode_endpoint(const std::vector<std::uint8_t>& bytes, int peer) {
  if (magic_of(bytes) == kRefusalMagic) {
    throw_refusal(bytes, peer);
  }
  EndpointLayout fixed{};
  if (bytes.size() >= sizeof(fixed)) {
    std::memcpy(&fixed, bytes.data(), sizeof(fixed));
  }
  if (fixed.magic != kEndpointMagic || fixed.version != kVersion) {
    throw Error("the record" + from(peer) +
                " is not an RDMA endpoint of this version; do both ranks run the same version?");
  }
  const std::size_t lane_bytes = sizeof(Lane) * fixed.lanes;
  const bool sane = fixed.lanes >= 1 && fixed.lanes <= kMostLanes &&
                    bytes.size() == sizeof(fixed) + lane_bytes && fixed.slots >= 1 &&
                    fixed.slots <= kMostSlots && fixed.slot_bytes <= kLargestRdmaSlotBytes &&
                    fixed.stride_bytes >= fixed.slot_bytes + kHeaderBytes &&
                    fixed.stride_bytes <= 2 * kLargestRdmaSlotBytes &&
                    fixed.arena_address <= ~std::uint64_t{0} - fixed.slots * fixed.stride_bytes &&
                    fixed.credit_address % sizeof(std::uint64_t) == 0;
  if (!sane) {
    throw Error("the RDMA endpoint" + from(peer) + " contradicts itself");
  }
  EndpointRecord record{fixed.job,
                        fixed.slot_bytes,
                        fixed.stride_bytes,
                        fixed.arena_address,
                        fixed.credit_address,
                        fixed.slots,
                        std::vector<Lane>(fixed.lanes)};
  std::memcpy(record.lanes.data(), bytes.data() + sizeof(fixed), lane_bytes);
  for (const Lane& lane : record.lanes) {
    check_lane(lane, peer);
  }
  return record;
}

std::vector<std::uint8_t> encode_refusal(const std::string& reason) {
  return tagged(kRefusalMagic, reason.substr(0, kLongestRefusal));
}

std::vector<std::uint8_t> encode_ready() {
  return tagged(kReadyMagic, "");
}

void decode_ready(const std::vector<std::uint8_t>& bytes, int peer) {
  if (magic_of(bytes) == kRefusalMagic) {
    throw_refusal(bytes, peer);
  }
  if (magic_of(bytes) != kReadyMagic || bytes.size() != sizeof(std::uint32_t)) {
    throw Error("the record" + from(peer) + " does not confirm that its queue pairs are ready");
  }
}

}  // namespace adaptive::rdma
