// Chooses the device, port and address of this node for a channel. The choice depends only on
// descriptions of devices, so that it can be tested without hardware.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "rdma/devices.h"

namespace adaptive::rdma {

struct Wanted {
  std::string device;         // "" for any
  int port = 0;               // 0 for any
  int gid_index = -1;         // -1 for the best
  unsigned mtu_bytes = 0;     // 0 for the port's
  std::string near_pci;       // "" for no preference
  std::string local_address;  // numeric address of the link's interface; "" if unknown
};

struct PortChoice {
  std::string device;
  int port = 0;
  bool ethernet = false;
  int gid_index = 0;
  std::string gid;  // written like an IPv6 address
  unsigned mtu_bytes = 0;
  std::string reason;  // why this port was chosen, for logs
};

// Returns the number of levels of the PCI tree that `device` and `near_pci` have in common. A
// larger number means nearer.
using Nearness = std::function<int(const std::string& device, const std::string& near_pci)>;
int pci_nearness(const std::string& device, const std::string& near_pci);

// Throws an Error that lists the devices and suggests a remedy.
PortChoice choose_port(const std::vector<RdmaDevice>& devices, const Wanted& wanted,
                       const Nearness& nearness = pci_nearness);

}  // namespace adaptive::rdma
