// Fuzzer of the records that open links and channels. Every parser gets the same bytes. Parts:
// csrc/common/hello.cc csrc/tcp/frame.cc csrc/rdma/wire.cc csrc/common/message.cc. Needs neither
// the verbs library nor a device.
#include <algorithm>
#include <functional>
#include <optional>

#include "common/error.h"
#include "common/hello.h"
#include "rdma/wire.h"
#include "tcp/frame.h"
#include "tests/fuzz.h"

namespace {

using adaptive::Hello;
using adaptive::HelloBytes;
using adaptive::Identity;
using adaptive::RecordHeader;
using adaptive::Verdict;
using adaptive::rdma::EndpointRecord;
using adaptive::rdma::Lane;
using adaptive::testing::FuzzInput;
using adaptive::testing::must;

constexpr std::uint64_t kJob = 3;

Identity self() {
  Identity identity;
  identity.token.fill(0x6b);
  identity.rank = 4;
  identity.purpose = "shm";
  return identity;
}

void fuzz_hello(const std::uint8_t* data, std::size_t size) {
  const std::optional<Hello> hello = adaptive::parse_hello(data, size);
  if (!hello) {
    return;
  }
  must(size == adaptive::kHelloBytes, "a hello of the right size");
  const Verdict verdict = adaptive::judge_hello(*hello, self());
  must(adaptive::reason_of(verdict) != nullptr && adaptive::reason_of(hello->verdict) != nullptr,
       "words for it");
  if (hello->version != adaptive::kLinkVersion) {
    must(verdict == Verdict::kOtherVersion, "no other version");
    return;
  }
  must(hello->self.purpose.size() <= adaptive::kMaxPurpose, "a purpose that fits");
  must(verdict != Verdict::kWelcome ||
           (adaptive::same_token(hello->self.token, self().token) && hello->target == 4),
       "nobody welcome without the token");
  const std::optional<Hello> again =
      adaptive::parse_hello(adaptive::encode_hello(*hello).data(), adaptive::kHelloBytes);
  must(again && again->self.rank == hello->self.rank && again->target == hello->target &&
           again->self.purpose == hello->self.purpose && again->verdict == hello->verdict,
       "the same after encoding it again");
}

// Runs a parser that may reject its input.
void attempt(const std::function<void()>& parse) {
  try {
    parse();
  } catch (const adaptive::Error&) {
  }
}

void fuzz_record_header(const FuzzInput& bytes) {
  const std::size_t num_bytes = adaptive::parse_record_header(bytes.data(), bytes.size(), 1000, 2);
  must(num_bytes <= 1000, "a record within the limit");
  const RecordHeader header = adaptive::encode_record_header(num_bytes, 2);
  must(std::equal(header.begin(), header.end(), bytes.begin()), "the same after encoding it again");
}

void fuzz_offer(const FuzzInput& bytes) {
  const adaptive::tcp::Offer offer = adaptive::tcp::parse_offer(bytes, kJob, 0);
  must(offer.slots >= 1 && offer.slots <= 64 && offer.slot_bytes >= 1, "slots");
  must(offer.slot_bytes <= adaptive::kLargestSlotBytes, "slots that can be");
  must(
      offer.silent_limit >= adaptive::kLeastSilence && offer.silent_limit <= adaptive::kMostSilence,
      "a limit that a channel can keep");
  must(adaptive::tcp::encode_offer(offer) == bytes, "the same bytes for the same offer");
}

void fuzz_endpoint(const FuzzInput& bytes) {
  const EndpointRecord record = adaptive::rdma::decode_endpoint(bytes, 0);
  must(record.slots >= 1 && record.slots <= adaptive::kMostSlots, "a possible slot count");
  must(!record.lanes.empty() && record.lanes.size() <= adaptive::rdma::kMostLanes,
       "a possible number of lanes");
  must(record.stride_bytes >= adaptive::rdma::kHeaderBytes &&
           record.slot_bytes <= record.stride_bytes - adaptive::rdma::kHeaderBytes,
       "slots that do not overlap");
  const unsigned __int128 end =
      static_cast<unsigned __int128>(record.stride_bytes) * record.slots + record.arena_address;
  must(end <= ~std::uint64_t{0}, "an arena that ends before the address space does");
  must(adaptive::rdma::encode(adaptive::rdma::decode_endpoint(adaptive::rdma::encode(record), 0)) ==
           adaptive::rdma::encode(record),
       "the same after encoding it again");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const FuzzInput bytes(data, data + size);
  fuzz_hello(data, size);
  attempt([&] { fuzz_record_header(bytes); });
  attempt([&] { fuzz_offer(bytes); });
  attempt([&] { fuzz_endpoint(bytes); });
  attempt([&] { adaptive::rdma::decode_ready(bytes, 0); });
  const auto bits = adaptive::testing::FuzzReader(data, size).take<std::uint32_t>();
  must(adaptive::rdma::pack(adaptive::rdma::unpack(bits)) == bits, "every bit accounted for");
  return 0;
}

std::vector<FuzzInput> adaptive::testing::fuzz_seeds() {
  Hello hello;
  hello.self = self();
  hello.target = 4;
  const HelloBytes welcome = encode_hello(hello);
  hello.version = 2;
  const HelloBytes other = encode_hello(hello);
  const RecordHeader header = encode_record_header(1000, 2);
  tcp::Offer offer;
  offer.job = kJob;
  offer.slots = 16;
  offer.slot_bytes = 1 << 20;
  offer.limit_bytes = 1 << 30;
  offer.silent_limit = std::chrono::milliseconds(10'000);
  EndpointRecord record;
  record.job = kJob;
  record.slot_bytes = 1 << 20;
  record.stride_bytes = rdma::stride_of(record.slot_bytes);
  record.arena_address = 0x7f00'0000'0000;
  record.credit_address = 0x7f00'4000'0000;
  record.slots = 16;
  Lane lane;
  lane.qp_out = 17;
  lane.qp_in = 18;
  lane.mtu = 3;
  lane.link_layer = 2;
  record.lanes.assign(1, lane);
  const FuzzInput one = rdma::encode(record);
  record.lanes.assign(4, lane);
  return {FuzzInput(welcome.begin(), welcome.end()),
          FuzzInput(other.begin(), other.end()),
          FuzzInput(header.begin(), header.end()),
          tcp::encode_offer(offer),
          one,
          rdma::encode(record),
          rdma::encode_refusal("no device"),
          rdma::encode_ready()};
}
