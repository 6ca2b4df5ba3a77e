// Owners of what a verbs device lends, and the calls that make them. Only for files that are
// compiled with the verbs headers.
#pragma once

#include <infiniband/verbs.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

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

// An opened port with what all queue pairs on it share. Members go in reverse order.
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

// Memory of this process that the device may use, zero and never swapped out. Throws Error with the
// remedy where the limits do not allow so much.
class Arena {
 public:
  Arena(std::shared_ptr<Device> device, std::size_t size_bytes, bool peer_writes);
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  std::byte* data() const noexcept { return static_cast<std::byte*>(memory_.get()); }
  std::uint64_t address() const noexcept { return reinterpret_cast<std::uintptr_t>(data()); }
  std::uint32_t local_key() const noexcept { return region_->lkey; }
  std::uint32_t remote_key() const noexcept { return region_->rkey; }

 private:
  struct Unmap {
    std::size_t size_bytes;
    void operator()(void* memory) const noexcept;
  };
  std::shared_ptr<Device> device_;
  std::unique_ptr<void, Unmap> memory_;
  MemoryRegion region_;
};

// Throws Error unless this process may lock so many bytes more in memory, and the node has them.
void check_lockable(std::size_t size_bytes);

// Lets the device reach memory of this process, or of a GPU as a DMA buffer. The second throws
// Error where the installed libibverbs does not know it.
MemoryRegion register_memory(ibv_pd* domain, void* memory, std::size_t size_bytes, int access);
MemoryRegion register_dmabuf(ibv_pd* domain, int dmabuf_fd, std::uint64_t offset,
                             std::size_t size_bytes, std::uint64_t address, int access);

CompletionQueue create_completion_queue(const Device& device, int entries);

struct QueueSizes {
  std::uint32_t sends = 0;
  std::uint32_t receives = 0;
};

// A queue pair that can have receives posted. `inline_bytes`: what is wished, then what there is.
QueuePair create_queue_pair(const Device& device, ibv_cq* completions, const QueueSizes& sizes,
                            std::uint32_t* inline_bytes);

struct RemoteQueuePair {
  std::uint32_t number = 0;
  std::uint32_t first_psn = 0;  // of what it sends
  Lane lane;                    // for its port's address
};

// How long this end tries; see RdmaOptions::ack_timeout.
struct Patience {
  std::uint8_t ack_timeout = 0;
};

// Connects it: from then on it sends, with `own_psn` first, and receives.
void connect(ibv_qp* queue_pair, const Device& device, const RemoteQueuePair& remote,
             std::uint32_t own_psn, const Patience& patience);

std::uint32_t random_psn();

// `mtu_bytes` as the verbs number it, 256 is 1; and back.
std::uint8_t mtu_code(unsigned mtu_bytes) noexcept;

}  // namespace adaptive::rdma
