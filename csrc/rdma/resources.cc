#ifdef MEGATRON_ADAPTIVE_RDMA

#include "rdma/resources.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>

#include "common/error.h"
#include "shm/limits.h"

namespace adaptive::rdma {
namespace {

// The maximum would be 7, but some devices treat 7 as no limit.
constexpr std::uint8_t kRetries = 6;
// A correct receiver always has receives posted, so this timer only delays an error.
constexpr std::uint8_t kRnrTimer = 12;  // 0.64 ms

// Protects registered memory from forks. On older kernels, a fork may otherwise move the pages of
// this process while the device uses them.
void prepare_for_forks() {
  static const int once = ::ibv_fork_init();
  static_cast<void>(once);  // only fails if memory was registered before; then it is too late
}

Context open_context(const std::string& name) {
  int count = 0;
  const DeviceList list(::ibv_get_device_list(&count));
  if (!list) {
    throw_errno("ibv_get_device_list", "");
  }
  for (int i = 0; i < count; ++i) {
    if (name == ::ibv_get_device_name(list.get()[i])) {
      Context context(::ibv_open_device(list.get()[i]));
      if (!context) {
        throw_errno("ibv_open_device", name);
      }
      return context;
    }
  }
  throw Error("the RDMA device " + name + " has disappeared");
}

// Returns whether this process has the capability CAP_IPC_LOCK, which lifts the limit on locked
// memory.
bool may_lock_any_amount() {
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct data[_LINUX_CAPABILITY_U32S_3] = {};
  return ::syscall(SYS_capget, &header, data) == 0 &&
         (data[CAP_TO_INDEX(CAP_IPC_LOCK)].effective & CAP_TO_MASK(CAP_IPC_LOCK)) != 0;
}

// Throws Error if this process may not lock this many additional bytes, or if the node does not
// have enough memory.
void check_lockable(std::size_t size_bytes) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0) {
    throw_errno("getrlimit", "RLIMIT_MEMLOCK");
  }
  const std::string status = "/proc/self/status";
  const std::uint64_t locked = 1024 * (read_field(status, "VmPin:") + read_field(status, "VmLck:"));
  if (limit.rlim_cur != RLIM_INFINITY && locked + size_bytes > limit.rlim_cur &&
      !may_lock_any_amount()) {
    throw Error("one direction of an RDMA channel needs " + bytes_text(size_bytes) +
                " of locked memory, but this process may lock only " + bytes_text(limit.rlim_cur) +
                " (" + bytes_text(locked) +
                " are in use). Raise the limit: `ulimit -l unlimited` in the shell that starts it, "
                "`* - memlock unlimited` in /etc/security/limits.conf, LimitMEMLOCK=infinity for a "
                "service, `--ulimit memlock=-1` for a container; or use fewer or smaller slots");
  }
  // The kernel pins the pages one by one. If memory ran out meanwhile, the kernel would kill some
  // process instead of returning an error.
  check_memory(size_bytes, "one direction of an RDMA channel");
}

MappedRegion make_lockable(std::size_t size_bytes) {
  check_lockable(size_bytes);
  return MappedRegion::anonymous(size_bytes);
}

void modify(ibv_qp* queue_pair, ibv_qp_attr& attributes, int mask, const char* to) {
  const int code = ::ibv_modify_qp(queue_pair, &attributes, mask);
  if (code != 0) {
    throw SystemError("ibv_modify_qp",
                      "number " + std::to_string(queue_pair->qp_num) + ", to " + to, code);
  }
}

void to_init(ibv_qp* queue_pair, int port) {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = static_cast<std::uint8_t>(port);
  attributes.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
  modify(queue_pair, attributes,
         IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, "INIT");
}

}  // namespace

std::shared_ptr<Device> open_device(const PortChoice& choice) {
  prepare_for_forks();
  auto device = std::make_shared<Device>();
  device->choice = choice;
  device->context = open_context(choice.device);
  ibv_port_attr port{};
  int code = ::ibv_query_port(device->context.get(), static_cast<std::uint8_t>(choice.port), &port);
  if (code != 0) {
    throw SystemError("ibv_query_port", choice.device, code);
  }
  device->lid = port.lid;
  code = ::ibv_query_gid(device->context.get(), static_cast<std::uint8_t>(choice.port),
                         choice.gid_index, &device->gid);
  if (code != 0) {
    throw Error("ibv_query_gid(" + choice.device + ", index " + std::to_string(choice.gid_index) +
                ") failed");
  }
  device->domain.reset(::ibv_alloc_pd(device->context.get()));
  if (!device->domain) {
    throw_errno("ibv_alloc_pd", choice.device);
  }
  device->events.reset(::ibv_create_comp_channel(device->context.get()));
  if (!device->events) {
    throw_errno("ibv_create_comp_channel", choice.device);
  }
  const int fd = device->events->fd;
  if (::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK) != 0) {
    throw_errno("fcntl", "O_NONBLOCK");
  }
  return device;
}

Arena::Arena(std::shared_ptr<Device> device, std::size_t size_bytes, bool peer_writes)
    : device_(std::move(device)),
      memory_(make_lockable(size_bytes)),
      region_(::ibv_reg_mr(device_->domain.get(), memory_.data(), size_bytes,
                           peer_writes ? IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE
                                       : IBV_ACCESS_LOCAL_WRITE)) {
  if (!region_) {
    throw_errno("ibv_reg_mr", std::to_string(size_bytes) + " bytes");
  }
}

void Receives::start(ibv_qp* queue_pair) {
  queue_pair_ = queue_pair;
  const int code = post(depth_);
  if (code != 0) {
    throw SystemError("ibv_post_recv", std::to_string(depth_) + " receives", code);
  }
}

int Receives::post(unsigned count) noexcept {
  std::array<ibv_recv_wr, 32> requests{};
  while (count > 0) {
    const unsigned now = std::min<unsigned>(count, requests.size());
    for (unsigned i = 0; i < now; ++i) {
      requests[i].wr_id = id_;
      requests[i].next = i + 1 < now ? &requests[i + 1] : nullptr;
    }
    ibv_recv_wr* refused = nullptr;
    const int code = ::ibv_post_recv(queue_pair_, requests.data(), &refused);
    if (code != 0) {
      return code;
    }
    count -= now;
  }
  return 0;
}

CompletionQueue create_completion_queue(const Device& device, int entries) {
  CompletionQueue queue(
      ::ibv_create_cq(device.context.get(), entries, nullptr, device.events.get(), 0));
  if (!queue) {
    throw_errno("ibv_create_cq",
                device.choice.device + ", " + std::to_string(entries) + " entries");
  }
  return queue;
}

QueuePair create_queue_pair(const Device& device, ibv_cq* completions, const QueueSizes& sizes,
                            std::uint32_t* inline_bytes) {
  ibv_qp_init_attr attributes{};
  QueuePair result;
  // The device's limit can only be found by trying.
  for (std::uint32_t wish = *inline_bytes;; wish /= 2) {
    attributes = {};
    attributes.send_cq = attributes.recv_cq = completions;
    attributes.qp_type = IBV_QPT_RC;
    attributes.cap.max_send_wr = sizes.sends;
    attributes.cap.max_recv_wr = sizes.receives;
    attributes.cap.max_send_sge = attributes.cap.max_recv_sge = 1;
    attributes.cap.max_inline_data = wish;
    result.reset(::ibv_create_qp(device.domain.get(), &attributes));
    if (result || wish == 0) {
      break;
    }
  }
  if (!result) {
    throw_errno("ibv_create_qp", device.choice.device + ", " + std::to_string(sizes.sends) +
                                     " sends, " + std::to_string(sizes.receives) + " receives");
  }
  *inline_bytes = attributes.cap.max_inline_data;
  to_init(result.get(), device.choice.port);
  return result;
}

void connect(ibv_qp* queue_pair, const Device& device, const RemoteQueuePair& remote,
             std::uint32_t own_psn, unsigned ack_timeout) {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTR;
  attributes.path_mtu =
      static_cast<ibv_mtu>(std::min(remote.lane.mtu, mtu_code(device.choice.mtu_bytes)));
  attributes.dest_qp_num = remote.number;
  attributes.rq_psn = remote.first_psn;
  attributes.min_rnr_timer = kRnrTimer;
  attributes.ah_attr.port_num = static_cast<std::uint8_t>(device.choice.port);
  attributes.ah_attr.dlid = remote.lane.lid;
  // Ethernet ports do not have local identifiers (LIDs) and are reached by GID. So is an InfiniBand
  // port without a LID.
  if (device.choice.ethernet || remote.lane.lid == 0) {
    attributes.ah_attr.is_global = 1;
    std::memcpy(attributes.ah_attr.grh.dgid.raw, remote.lane.gid.data(), remote.lane.gid.size());
    attributes.ah_attr.grh.sgid_index = static_cast<std::uint8_t>(device.choice.gid_index);
    attributes.ah_attr.grh.hop_limit = 64;
  }
  modify(queue_pair, attributes,
         IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
             IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
         "RTR (is there a route to the peer's address on this device?)");
  attributes = {};
  attributes.qp_state = IBV_QPS_RTS;
  attributes.sq_psn = own_psn;
  attributes.timeout = static_cast<std::uint8_t>(ack_timeout);
  attributes.retry_cnt = kRetries;
  attributes.rnr_retry = kRetries;
  modify(queue_pair, attributes,
         IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
             IBV_QP_MAX_QP_RD_ATOMIC,
         "RTS");
}

std::uint32_t random_psn() {
  std::uint32_t value = 0;
  if (::getrandom(&value, sizeof(value), 0) != static_cast<ssize_t>(sizeof(value))) {
    throw_errno("getrandom", "4 bytes");
  }
  return value & kNumberMask;
}

std::uint8_t mtu_code(unsigned mtu_bytes) noexcept {
  std::uint8_t code = 1;
  while (code < 5 && (256U << code) <= mtu_bytes) {
    ++code;
  }
  return code;
}

}  // namespace adaptive::rdma

#endif
