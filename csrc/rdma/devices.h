// What this node offers for RDMA: devices, their ports, and the addresses (GIDs) of each port.
//
// Always declared; a build without the verbs headers answers every question with an Error that
// says so.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace adaptive {

struct RdmaGid {
  int index;
  std::string address;  // as an IPv6 address
  std::string type;     // "IB/RoCE v1" or "RoCE v2" as the kernel calls them, "" when unknown
};

struct RdmaPort {
  int number;
  std::string state;       // "ACTIVE", "DOWN", ...
  std::string link_layer;  // "InfiniBand", "Ethernet" or "unspecified"
  std::uint32_t active_mtu_bytes;
  std::vector<RdmaGid> gids;
};

struct RdmaDevice {
  std::string name;
  std::vector<RdmaPort> ports;
};

// Whether the verbs headers were there when this was built.
bool built_with_rdma() noexcept;

// Every verbs device of this node; none is an empty list. Throws SystemError when a device cannot
// be asked, Error in a build without the headers.
std::vector<RdmaDevice> list_rdma_devices();

}  // namespace adaptive
