// Fuzzer of the records that open an RDMA channel, and of its immediate values. Parts:
// csrc/rdma/wire.cc; needs neither the library nor a device.
#include "common/error.h"
#include "rdma/wire.h"
#include "tests/fuzz.h"

namespace {

using adaptive::rdma::EndpointRecord;
using adaptive::rdma::Immediate;
using adaptive::rdma::Lane;
using adaptive::testing::FuzzInput;
using adaptive::testing::must;

void check_accepted(const EndpointRecord& record) {
  must(record.slots >= 1 && record.slots <= adaptive::kMostSlots, "a possible slot count");
  must(!record.lanes.empty() && record.lanes.size() <= adaptive::rdma::kMostLanes,
       "a possible number of lanes");
  must(record.stride_bytes >= adaptive::rdma::kHeaderBytes &&
           record.slot_bytes <= record.stride_bytes - adaptive::rdma::kHeaderBytes,
       "slots that do not overlap");
  const unsigned __int128 end =
      static_cast<unsigned __int128>(record.stride_bytes) * record.slots + record.arena_address;
  must(end <= ~std::uint64_t{0}, "an arena that ends before the address space does");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const FuzzInput bytes(data, data + size);
  try {
    const EndpointRecord record = adaptive::rdma::decode_endpoint(bytes, 0);
    check_accepted(record);
    must(adaptive::rdma::encode(adaptive::rdma::decode_endpoint(
             adaptive::rdma::encode(record), 0)) == adaptive::rdma::encode(record),
         "the same after encoding it again");
  } catch (const adaptive::Error&) {
  }
  try {
    adaptive::rdma::decode_ready(bytes, 0);
  } catch (const adaptive::Error&) {
  }
  const auto bits = adaptive::testing::FuzzReader(data, size).take<std::uint32_t>();
  must(adaptive::rdma::pack(adaptive::rdma::unpack(bits)) == bits, "every bit accounted for");
  return 0;
}

std::vector<FuzzInput> adaptive::testing::fuzz_seeds() {
  EndpointRecord record;
  record.job = 3;
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
  return {one, rdma::encode(record), rdma::encode_refusal("no device"), rdma::encode_ready()};
}
