// Tests of the RDMA transport that need no hardware: the choice of a port, the records that peers
// exchange, and the texts of errors.
#include <cstring>

#include "common/error.h"
#include "rdma/select.h"
#include "rdma/status.h"
#include "rdma/wire.h"
#include "tests/check.h"

namespace {

using namespace adaptive;           // NOLINT: a test
using namespace adaptive::rdma;     // NOLINT
using namespace adaptive::testing;  // NOLINT

using Bytes = std::vector<std::uint8_t>;

RdmaPort port(int number, const std::string& state, const std::string& layer,
              std::vector<RdmaGid> gids, unsigned mtu = 4096) {
  return {number, state, layer, mtu, std::move(gids)};
}

const std::vector<RdmaGid> kRoceGids{
    {0, "fe80::1", "IB/RoCE v1"},         {1, "fe80::1", "RoCE v2"},
    {2, "::ffff:10.0.0.3", "IB/RoCE v1"}, {3, "::ffff:10.0.0.3", "RoCE v2"},
    {4, "2001:db8::3", "RoCE v2"},        {5, "::ffff:192.168.0.3", "RoCE v2"},
};

int no_nearness(const std::string&, const std::string&) {
  return 0;
}

TEST(a_port_is_found_by_itself) {
  const std::vector<RdmaDevice> devices{
      {"mlx5_0", {port(1, "DOWN", "Ethernet", kRoceGids)}},
      {"mlx5_1", {port(1, "ACTIVE", "Ethernet", kRoceGids, 1024)}},
      {"mlx5_2", {port(1, "ACTIVE", "InfiniBand", {{0, "fe80::2", ""}})}},
  };
  Wanted wanted;
  PortChoice choice = choose_port(devices, wanted, no_nearness);
  check(choice.device == "mlx5_1" && choice.port == 1 && choice.ethernet, "the first active one");
  check(choice.gid_index == 3 && choice.gid == "::ffff:10.0.0.3" && choice.mtu_bytes == 1024,
        "its RoCE v2 GID made of an IPv4 address");
  check_contains(choice.reason, "active");

  wanted.local_address = "192.168.0.3";
  choice = choose_port(devices, wanted, no_nearness);
  check(choice.gid_index == 5, "the GID of the link's address");
  check_contains(choice.reason, "192.168.0.3");
  wanted.local_address = "2001:db8::3";
  check(choose_port(devices, wanted, no_nearness).gid_index == 4, "also of IPv6");
  wanted.local_address = "10.9.9.9";
  check(choose_port(devices, wanted, no_nearness).gid_index == 3, "the usual one otherwise");

  wanted.device = "mlx5_2";
  choice = choose_port(devices, wanted, no_nearness);
  check(choice.device == "mlx5_2" && !choice.ethernet && choice.gid_index == 0, "what is wished");
  check_contains(choice.reason, "asked for");
}

TEST(the_nearest_and_the_link_s_own_device_are_preferred) {
  const auto device = [](const std::string& name, const std::string& address) {
    return RdmaDevice{name, {port(1, "ACTIVE", "Ethernet", {{0, "::ffff:" + address, "RoCE v2"}})}};
  };
  const std::vector<RdmaDevice> devices{device("a", "10.0.0.1"), device("b", "10.0.0.2"),
                                        device("c", "10.0.0.3")};
  Wanted wanted;
  wanted.local_address = "10.0.0.2";
  check(choose_port(devices, wanted, no_nearness).device == "b", "the device of the link");
  wanted.near_pci = "0000:3b:00.0";
  const auto nearness = [](const std::string& name, const std::string&) {
    return name == "c" ? 5 : 2;
  };
  const PortChoice choice = choose_port(devices, wanted, nearness);
  check(choice.device == "c", "the device near the GPU");
  check_contains(choice.reason, "nearest to 0000:3b:00.0");
}

TEST(what_cannot_be_had_is_explained) {
  const std::vector<RdmaDevice> devices{
      {"rxe0", {port(1, "ACTIVE", "Ethernet", kRoceGids, 1024)}},
      {"rxe1", {port(1, "DOWN", "Ethernet", kRoceGids)}},
      {"rxe2", {port(1, "ACTIVE", "Ethernet", {})}},
  };
  const auto refused = [&](const Wanted& wanted, const std::string& words) {
    check_throws<Error>([&] { choose_port(devices, wanted, no_nearness); }, words);
  };
  check_throws<Error>([] { choose_port({}, {}, no_nearness); },
                      "this node has no RDMA device; RDMA ports of this node: none. Load");
  Wanted wanted;
  wanted.device = "mlx5_0";
  refused(wanted, "of device 'mlx5_0'; RDMA ports of this node: rxe0 port 1 (Ethernet, ACTIVE, 6 ");
  wanted = {};
  wanted.port = 2;
  refused(wanted, "there is no RDMA port 2 ");
  wanted = {};
  wanted.device = "rxe1";
  refused(wanted, "no RDMA port is active and has an address");
  wanted.device = "rxe2";
  refused(wanted, "no RDMA port is active and has an address");
  wanted = {};
  wanted.gid_index = 17;
  refused(wanted, "no active RDMA port has a GID with index 17");
  wanted = {};
  wanted.mtu_bytes = 1500;
  refused(wanted, "1500 bytes was asked for; it must be one of 256, 512, 1024, 2048, 4096");
  wanted.mtu_bytes = 4096;
  refused(wanted, "but rxe0 has 1024");
  wanted.mtu_bytes = 512;
  check(choose_port(devices, wanted, no_nearness).mtu_bytes == 512, "a smaller MTU");
}

EndpointRecord some_record(std::size_t num_lanes) {
  EndpointRecord record;
  record.job = 0x1122'3344'5566'7788;
  record.slot_bytes = 1 << 20;
  record.stride_bytes = stride_of(1 << 20);
  record.arena_address = 0x7f00'0000'1000;
  record.credit_address = 0x7f00'0000'0008;
  record.slots = 64;
  for (std::size_t i = 0; i < num_lanes; ++i) {
    Lane lane;
    lane.qp_out = 0xabc000 + static_cast<std::uint32_t>(i);
    lane.qp_in = 0xdef000;
    lane.psn_out = 0xffffff;
    lane.psn_in = 1;
    lane.arena_key = 0x12345678;
    lane.credit_key = 0x9abcdef0;
    lane.lid = 513;
    lane.mtu = 5;
    lane.link_layer = 2;
    for (std::size_t j = 0; j < lane.gid.size(); ++j) {
      lane.gid[j] = static_cast<std::uint8_t>(j);
    }
    record.lanes.push_back(lane);
  }
  return record;
}

TEST(records_survive_the_way) {
  for (std::size_t num_lanes : {1U, 16U}) {
    const EndpointRecord record = some_record(num_lanes);
    const Bytes bytes = encode(record);
    check(bytes.size() == 64 + 64 * num_lanes && bytes.size() <= kLargestRecordBytes, "its size");
    const EndpointRecord back = decode_endpoint(bytes, 3);
    check(encode(back) == bytes && back.job == record.job && back.lanes.size() == num_lanes,
          "the same record");
    check(back.lanes[0].gid == record.lanes[0].gid && back.lanes[0].lid == 513, "the same lane");
  }
  // The positions are those in docs/reference/transport.md.
  const Bytes bytes = encode(some_record(1));
  check(std::memcmp(bytes.data(), "DRP1\x01\x00\x01\x00\x40\x00\x00\x00", 12) == 0, "the start");
  check(bytes[16] == 0x88 && bytes[64] == 0x00 && bytes[66] == 0xab && bytes[91] == 2 &&
            bytes[96 + 15] == 15,
        "fields in their places");
}

TEST(foreign_records_are_refused) {
  const auto refused = [](const Bytes& bytes, const std::string& words) {
    check_throws<Error>([&] { decode_endpoint(bytes, 3); }, words);
  };
  const Bytes good = encode(some_record(2));
  refused({}, "not an RDMA endpoint of this version");
  refused(Bytes(good.begin(), good.begin() + 63), "not an RDMA endpoint");
  refused(Bytes(good.begin(), good.end() - 1), "contradicts itself");
  const auto changed = [&](std::size_t at, std::uint8_t value) {
    Bytes bytes = good;
    bytes[at] = value;
    return bytes;
  };
  refused(changed(0, 0), "not an RDMA endpoint");
  refused(changed(4, 9), "not an RDMA endpoint");
  refused(changed(6, 17), "contradicts itself");  // lanes
  refused(changed(6, 0), "contradicts itself");
  refused(changed(8, 65), "contradicts itself");  // slots
  refused(changed(29, 1), "contradicts itself");  // slot_bytes
  refused(changed(34, 0), "contradicts itself");  // stride below the slot
  refused(changed(48, 1), "contradicts itself");  // credit word not aligned
  refused(changed(67, 1), "impossible numbers");  // queue pair number above 24 bits
  refused(changed(90, 6), "impossible numbers");  // MTU
  refused(encode_refusal("no device\n\x1b[31m here"),
          "rank 3 cannot open an RDMA channel: no device  [31m here");
  check(encode_refusal(std::string(5000, 'x')).size() < 1000, "a refusal that fits");
  decode_ready(encode_ready(), 3);
  check_throws<Error>([&] { decode_ready(good, 3); }, "does not confirm");
  check_throws<Error>([] { decode_ready(encode_refusal("why"), 3); }, "why");
}

TEST(immediates_survive_the_way) {
  for (std::uint32_t bits : {0U, 0xffff'ffffU, 0x1234'5678U, 0x0000'01c5U}) {
    check(pack(unpack(bits)) == bits, "the same bits");
  }
  const Immediate value = unpack(0x0001'02c3U);
  check(value.number == 0x102 && value.control && value.urgent && value.slot == 3, "fields");
  check(pack({0x1000005, false, true, 63}) == 0x0000'057fU, "24 bits of the number");
}

TEST(strides_are_whole_pages) {
  check(stride_of(1) == 4096 && stride_of(4096 - 128) == 4096 && stride_of(4096) == 8192 &&
            stride_of(1 << 20) == (1 << 20) + 4096,
        "room for header and payload");
}

TEST(every_status_has_words) {
  for (int status = -1; status < 40; ++status) {
    const StatusText text = status_text(status);
    check(std::strlen(text.name) > 3 && std::strlen(text.cause) > 10, "words");
  }
  check(status_text(12).kind == Failure::Kind::kPeerLost, "a peer lost where nothing comes back");
  check(
      describe_status("a write", 10, 0x88)
              .rfind("a write failed with REM_ACCESS_ERR (status 10, vendor code 0x88): ", 0) == 0,
      "a sentence");
}

}  // namespace
