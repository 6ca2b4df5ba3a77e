// The RDMA devices of this node, their ports, and the addresses (GIDs) of each port.
//
// The functions are declared in every build. In a build without the verbs headers,
// list_rdma_devices() throws Error.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace adaptive {

struct RdmaGid {
  int index;
  std::string address;  // written like an IPv6 address
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

// Returns whether the verbs headers were available at build time.
bool built_with_rdma() noexcept;

// Returns all verbs devices of this node; the list may be empty. Throws SystemError if a device
// cannot be queried, and Error in a build without the headers.
std::vector<RdmaDevice> list_rdma_devices();

}  // namespace adaptive
