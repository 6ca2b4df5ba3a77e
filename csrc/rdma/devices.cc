#include "rdma/devices.h"

#include "common/error.h"

#ifdef MEGATRON_ADAPTIVE_RDMA

#include <arpa/inet.h>

#include <cerrno>
#include <fstream>

#include "rdma/resources.h"

namespace adaptive {
namespace {

using rdma::DeviceList;

std::string link_layer_name(std::uint8_t link_layer) {
  switch (link_layer) {
    case IBV_LINK_LAYER_INFINIBAND:
      return "InfiniBand";
    case IBV_LINK_LAYER_ETHERNET:
      return "Ethernet";
    default:
      return "unspecified";
  }
}

std::string state_name(ibv_port_state state) {
  switch (state) {
    case IBV_PORT_DOWN:
      return "DOWN";
    case IBV_PORT_INIT:
      return "INIT";
    case IBV_PORT_ARMED:
      return "ARMED";
    case IBV_PORT_ACTIVE:
      return "ACTIVE";
    default:
      return "state " + std::to_string(static_cast<int>(state));
  }
}

std::uint32_t mtu_bytes(ibv_mtu mtu) noexcept {
  // IBV_MTU_256 is 1, and each further value doubles the size.
  return mtu >= IBV_MTU_256 && mtu <= IBV_MTU_4096 ? 128U << static_cast<unsigned>(mtu) : 0;
}

// The type is read from sysfs, because some installed libraries are older than the verbs function
// that returns it.
std::string gid_type(const std::string& device, int port, int index) {
  std::ifstream file("/sys/class/infiniband/" + device + "/ports/" + std::to_string(port) +
                     "/gid_attrs/types/" + std::to_string(index));
  std::string type;
  std::getline(file, type);
  return type;
}

std::vector<RdmaGid> list_gids(ibv_context* context, const std::string& device, int port,
                               int table_length) {
  std::vector<RdmaGid> gids;
  for (int index = 0; index < table_length; ++index) {
    ibv_gid gid{};
    if (::ibv_query_gid(context, static_cast<std::uint8_t>(port), index, &gid) != 0) {
      continue;  // an empty entry of the table
    }
    if (gid.global.subnet_prefix == 0 && gid.global.interface_id == 0) {
      continue;
    }
    char text[INET6_ADDRSTRLEN] = {};
    ::inet_ntop(AF_INET6, gid.raw, text, sizeof(text));
    gids.push_back({index, text, gid_type(device, port, index)});
  }
  return gids;
}

RdmaPort describe_port(ibv_context* context, const std::string& device, int number) {
  ibv_port_attr attributes{};
  const int code = ::ibv_query_port(context, static_cast<std::uint8_t>(number), &attributes);
  if (code != 0) {
    throw SystemError("ibv_query_port", device + ", port " + std::to_string(number), code);
  }
  return {number, state_name(attributes.state), link_layer_name(attributes.link_layer),
          mtu_bytes(attributes.active_mtu),
          list_gids(context, device, number, attributes.gid_tbl_len)};
}

RdmaDevice describe_device(ibv_device* device) {
  RdmaDevice result{::ibv_get_device_name(device), {}};
  const rdma::Context context(::ibv_open_device(device));
  if (!context) {
    throw_errno("ibv_open_device", result.name);
  }
  ibv_device_attr attributes{};
  const int code = ::ibv_query_device(context.get(), &attributes);
  if (code != 0) {
    throw SystemError("ibv_query_device", result.name, code);
  }
  for (int port = 1; port <= attributes.phys_port_cnt; ++port) {
    result.ports.push_back(describe_port(context.get(), result.name, port));
  }
  return result;
}

}  // namespace

bool built_with_rdma() noexcept {
  return true;
}

std::vector<RdmaDevice> list_rdma_devices() {
  int count = 0;
  const DeviceList list(::ibv_get_device_list(&count));
  if (!list) {
    if (errno == ENOSYS) {
      return {};  // the kernel does not support RDMA, so there are no devices
    }
    throw_errno("ibv_get_device_list", "");
  }
  std::vector<RdmaDevice> devices;
  for (int i = 0; i < count; ++i) {
    devices.push_back(describe_device(list.get()[i]));
  }
  return devices;
}

}  // namespace adaptive

#else

namespace adaptive {

bool built_with_rdma() noexcept {
  return false;
}

std::vector<RdmaDevice> list_rdma_devices() {
  throw Error(
      "the extension was built without RDMA: install libibverbs-dev and build it again with "
      "MEGATRON_ADAPTIVE_RDMA=1");
}

}  // namespace adaptive

#endif
