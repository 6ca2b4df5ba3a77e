#include "rdma/select.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>
#include <optional>
#include <tuple>

#include "common/error.h"

namespace adaptive::rdma {
namespace {

constexpr const char* kMapped = "::ffff:";

bool is_mapped(const std::string& gid) {
  return gid.rfind(kMapped, 0) == 0 && gid.find('.') != std::string::npos;
}

bool is_link_local(const std::string& gid) {
  return gid.rfind("fe80:", 0) == 0;
}

bool is_of(const RdmaGid& gid, const std::string& address) {
  return !address.empty() && (gid.address == address || gid.address == kMapped + address);
}

// Returns the preference of a GID; higher is better. Both ends must use the same RoCE version, and
// only version 2 passes routers. Among the version 2 GIDs, every node has one that is derived from
// an IPv4 address.
int rank_of(const RdmaGid& gid, const std::string& local_address) {
  const bool v2 = gid.type == "RoCE v2" || gid.type.empty();
  const int scope = is_mapped(gid.address) ? 2 : is_link_local(gid.address) ? 0 : 1;
  return (v2 ? 8 : 0) + scope + (is_of(gid, local_address) ? 4 : 0);
}

const RdmaGid* best_gid(const RdmaPort& port, const std::string& local_address) {
  const RdmaGid* best = nullptr;
  for (const RdmaGid& gid : port.gids) {
    if (best == nullptr || rank_of(gid, local_address) > rank_of(*best, local_address)) {
      best = &gid;
    }
  }
  return best;
}

std::string list_of(const std::vector<RdmaDevice>& devices) {
  std::string text;
  for (const RdmaDevice& device : devices) {
    for (const RdmaPort& port : device.ports) {
      text += (text.empty() ? "" : ", ") + device.name + " port " + std::to_string(port.number) +
              " (" + port.link_layer + ", " + port.state + ", " + std::to_string(port.gids.size()) +
              " GIDs)";
    }
  }
  return text.empty() ? "none" : text;
}

[[noreturn]] void refuse(const std::string& finding, const std::vector<RdmaDevice>& devices,
                         const std::string& remedy) {
  throw Error(finding + "; RDMA ports of this node: " + list_of(devices) + ". " + remedy);
}

struct Candidate {
  const RdmaDevice* device = nullptr;
  const RdmaPort* port = nullptr;
  const RdmaGid* gid = nullptr;
  bool of_link = false;
  int nearness = 0;
};

bool fits(const RdmaDevice& device, const RdmaPort& port, const Wanted& wanted) {
  return (wanted.device.empty() || wanted.device == device.name) &&
         (wanted.port == 0 || wanted.port == port.number);
}

const RdmaGid* wanted_gid(const RdmaPort& port, const Wanted& wanted) {
  if (wanted.gid_index < 0) {
    return best_gid(port, wanted.local_address);
  }
  const auto found = std::find_if(port.gids.begin(), port.gids.end(), [&](const RdmaGid& gid) {
    return gid.index == wanted.gid_index;
  });
  return found == port.gids.end() ? nullptr : &*found;
}

unsigned usable_mtu(const Candidate& chosen, const Wanted& wanted,
                    const std::vector<RdmaDevice>& devices) {
  constexpr std::array<unsigned, 5> kSizes{256, 512, 1024, 2048, 4096};
  const unsigned active = chosen.port->active_mtu_bytes;
  if (wanted.mtu_bytes == 0) {
    return active == 0 ? 1024 : active;
  }
  if (std::find(kSizes.begin(), kSizes.end(), wanted.mtu_bytes) == kSizes.end()) {
    throw Error("an RDMA MTU of " + std::to_string(wanted.mtu_bytes) +
                " bytes was asked for; it must be one of 256, 512, 1024, 2048, 4096");
  }
  if (active != 0 && wanted.mtu_bytes > active) {
    refuse("an RDMA MTU of " + std::to_string(wanted.mtu_bytes) + " bytes was asked for, but " +
               chosen.device->name + " has " + std::to_string(active),
           devices, "Raise the MTU of its network interface or ask for less.");
  }
  return wanted.mtu_bytes;
}

std::string why(const Candidate& chosen, const Wanted& wanted) {
  if (!wanted.device.empty()) {
    return "it was asked for";
  }
  if (!wanted.near_pci.empty() && chosen.nearness > 0) {
    return "it is nearest to " + wanted.near_pci;
  }
  if (chosen.of_link) {
    return "it has the address " + wanted.local_address + " that the ranks connect by";
  }
  return "its port is active";
}

}  // namespace

int pci_nearness(const std::string& device, const std::string& near_pci) {
  const auto resolve = [](const std::string& path) {
    struct Free {
      void operator()(char* text) const noexcept { std::free(text); }
    };
    const std::unique_ptr<char, Free> real(::realpath(path.c_str(), nullptr));
    return real ? std::string(real.get()) : std::string();
  };
  const std::string ours = resolve("/sys/class/infiniband/" + device + "/device");
  const std::string theirs = resolve("/sys/bus/pci/devices/" + near_pci);
  const auto [end, ignored] = std::mismatch(ours.begin(), ours.end(), theirs.begin(), theirs.end());
  return static_cast<int>(std::count(ours.begin(), end, '/'));
}

PortChoice choose_port(const std::vector<RdmaDevice>& devices, const Wanted& wanted,
                       const Nearness& nearness) {
  if (devices.empty()) {
    refuse("this node has no RDMA device", devices,
           "Load the driver of the network card (mlx5_ib, irdma, bnxt_re), or give a container "
           "/dev/infiniband; `ibv_devices` lists the devices.");
  }
  std::optional<Candidate> best;
  bool any_fits = false;
  for (const RdmaDevice& device : devices) {
    for (const RdmaPort& port : device.ports) {
      if (!fits(device, port, wanted)) {
        continue;
      }
      any_fits = true;
      const RdmaGid* gid = wanted_gid(port, wanted);
      if (port.state != "ACTIVE" || gid == nullptr) {
        continue;
      }
      const Candidate found{&device, &port, gid, is_of(*gid, wanted.local_address),
                            wanted.near_pci.empty() ? 0 : nearness(device.name, wanted.near_pci)};
      // If several ports are equally good, the first wins, so that ranks on nodes of the same kind
      // choose the same port.
      if (!best ||
          std::tie(found.nearness, found.of_link) > std::tie(best->nearness, best->of_link)) {
        best = found;
      }
    }
  }
  if (!any_fits) {
    refuse("there is no RDMA port " + (wanted.port == 0 ? "" : std::to_string(wanted.port) + " ") +
               "of device '" + wanted.device + "'",
           devices, "Choose one of these, or leave the choice to the program.");
  }
  if (!best) {
    refuse(wanted.gid_index < 0
               ? "no RDMA port is active and has an address"
               : "no active RDMA port has a GID with index " + std::to_string(wanted.gid_index),
           devices,
           "Bring the network interface up and give it an IP address (`rdma link`, `ip addr`); "
           "`show_gids` or `ibv_devinfo -v` lists the addresses.");
  }
  const unsigned mtu = usable_mtu(*best, wanted, devices);
  return {best->device->name, best->port->number, best->port->link_layer == "Ethernet",
          best->gid->index,   best->gid->address, mtu,
          why(*best, wanted)};
}

}  // namespace adaptive::rdma
