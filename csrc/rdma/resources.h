// Classes that own verbs resources, and functions that create them. Only for files that are
// compiled with the verbs headers.
#pragma once

#include <infiniband/verbs.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "common/mapped_region.h"
#include "rdma/select.h"
#include "rdma/wire.h"

namespace adaptive::rdma {

struct Destroy {
  void operator()(ibv_context* it) const noexcept { ::ibv_close_device(it); }
  void operator()(ibv_pd* it) const noexcept { ::ibv_dealloc_pd(it); }
  void operator()(ibv_comp_channel* it) const noexcept { ::ibv_destroy_comp_channel(it); }
  void operator()(ibv_cq* it) const noexcept { ::ibv_destroy_cq(it); }
  void operator()(ibv_qp* it) const noexcept { ::ibv_destroy_qp(it); }
  void operator()(ibv_mr* it) const noexcept { ::ibv_dereg_mr(it); }
};
using Context = std::unique_ptr<ibv_context, Destroy>;
using ProtectionDomain = std::unique_ptr<ibv_pd, Destroy>;
using EventChannel = std::unique_ptr<ibv_comp_channel, Destroy>;
using CompletionQueue = std::unique_ptr<ibv_cq, Destroy>;
using QueuePair = std::unique_ptr<ibv_qp, Destroy>;
using MemoryRegion = std::unique_ptr<ibv_mr, Destroy>;

struct FreeDeviceList {
  void operator()(ibv_device** list) const noexcept { ::ibv_free_device_list(list); }
};
using DeviceList = std::unique_ptr<ibv_device*, FreeDeviceList>;

// Bit in a completion's id that marks a receive. The other bits are the index of the queue pair.
constexpr std::uint64_t kReceiveId = std::uint64_t{1} << 63;

// An opened port with the objects that all its queue pairs share. Members are destroyed in reverse
// order.
struct Device {
  PortChoice choice;
  Context context;
  ProtectionDomain domain;
  EventChannel events;  // non-blocking
  ibv_gid gid{};
  std::uint16_t lid = 0;
};

// Throws Error, SystemError.
std::shared_ptr<Device> open_device(const PortChoice& choice);

// Memory, initially zero, that the device may access and that is never swapped out. The constructor
// throws Error with a remedy if the limits do not allow this size.
class Arena {
 public:
  Arena(std::shared_ptr<Device> device, std::size_t size_bytes, bool peer_writes);
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  std::byte* data() const noexcept { return memory_.data(); }
  std::size_t size_bytes() const noexcept { return memory_.size_bytes(); }
  std::uint64_t address() const noexcept { return reinterpret_cast<std::uintptr_t>(data()); }
  std::uint32_t local_key() const noexcept { return region_->lkey; }
  std::uint32_t remote_key() const noexcept { return region_->rkey; }

 private:
  std::shared_ptr<Device> device_;
  MappedRegion memory_;
  MemoryRegion region_;
};

CompletionQueue create_completion_queue(const Device& device, int entries);

struct QueueSizes {
  std::uint32_t sends = 0;
  std::uint32_t receives = 0;
};

// Creates a queue pair to which receives can be posted. `inline_bytes` is the desired size of
// inline data on entry and the actual size on return.
QueuePair create_queue_pair(const Device& device, ibv_cq* completions, const QueueSizes& sizes,
                            std::uint32_t* inline_bytes);

struct RemoteQueuePair {
  std::uint32_t number = 0;
  std::uint32_t first_psn = 0;  // number of the first packet that it sends
  Lane lane;                    // contains the address of its port
};

// Connects the queue pair. It can then receive, and send packets beginning with number `own_psn`.
// For `ack_timeout` see RdmaOptions.
void connect(ibv_qp* queue_pair, const Device& device, const RemoteQueuePair& remote,
             std::uint32_t own_psn, unsigned ack_timeout);

// The posted receives of a queue pair. They have no memory; each write with immediate consumes one
// of them.
class Receives {
 public:
  // `most_outstanding` is the maximum number of writes with immediate for which used() has not been
  // called yet. `id` becomes the id of the receives' completions.
  Receives(unsigned most_outstanding, std::uint64_t id) noexcept
      : batch_(most_outstanding < 2 ? 1 : most_outstanding / 2),
        depth_(most_outstanding + batch_),
        id_(id) {}

  // Number of receives that the queue pair must support.
  std::uint32_t depth() const noexcept { return depth_; }

  // Posts the first receives. Throws SystemError.
  void start(ibv_qp* queue_pair);

  // Must be called for each completion. Posts new receives in batches; returns false if this fails.
  bool used() noexcept {
    if (++num_used_ < batch_) {
      return true;
    }
    const unsigned count = num_used_;
    num_used_ = 0;
    return post(count) == 0;
  }

 private:
  int post(unsigned count) noexcept;

  unsigned batch_;
  unsigned depth_;
  std::uint64_t id_;
  unsigned num_used_ = 0;
  ibv_qp* queue_pair_ = nullptr;
};

// Controls when a completion queue wakes the reactor. A request reports only the next entry of its
// kind, and must be repeated after each event. After a request, the caller must read the queue,
// because earlier entries cause no event.
class Notify {
 public:
  enum class Level { kNone, kSolicited, kAll };

  explicit Notify(ibv_cq* queue) noexcept : queue_(queue) {}

  // Requests an event, unless a request of at least this level is already pending. Returns false if
  // the device has failed.
  bool ask(Level level) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    return ask_locked(level);
  }

  // Must be called for each event. Returns the level that was requested, and requests `next`. This
  // may overwrite a higher level that was requested meanwhile, so the caller must ring the bell
  // afterwards. Sleeping threads then check the queue again and repeat their request.
  Level taken(Level next) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Level before = level_;
    level_ = Level::kNone;
    ask_locked(next);
    return before;
  }

 private:
  bool ask_locked(Level level) noexcept {
    if (level <= level_) {
      return true;
    }
    level_ = level;
    return ::ibv_req_notify_cq(queue_, level == Level::kSolicited ? 1 : 0) == 0;
  }

  ibv_cq* queue_;
  std::mutex mutex_;
  Level level_ = Level::kNone;
};

std::uint32_t random_psn();

// Converts an MTU in bytes to its code in the verbs headers. The code of 256 bytes is 1.
std::uint8_t mtu_code(unsigned mtu_bytes) noexcept;

}  // namespace adaptive::rdma
