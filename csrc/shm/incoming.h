// The receiving end of a directed channel.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "common/assembler.h"
#include "common/channel_state.h"
#include "common/completions.h"
#include "common/mapped_region.h"
#include "common/scoped_fd.h"
#include "shm/device_slots.h"
#include "shm/ring.h"

namespace adaptive::shm {

// This object lives until the last view of one of its slots is destroyed. The shared memory is not
// trusted, so all values are copied first and then checked.
class Incoming final : public Source, public std::enable_shared_from_this<Incoming> {
 public:
  Incoming(std::shared_ptr<ChannelState> channel_state, std::uint64_t limit_bytes,
           const Offer& layout, MappedRegion control, MappedRegion data, ScopedFd credit_fd,
           bool flush_computed);

  ~Incoming() override;

  // Accepts payloads in `arena` from now on. Must be called before the first poll().
  void use_device(cuda::Arena arena, ScopedFd sender);

  bool poll(Completions& into) noexcept override;

  // Must be called if the peer is lost or silent for too long. A Failure is delivered after the
  // last message from the peer.
  void lose(const std::string& reason) noexcept;

  // Stops reading, and notifies the peer. Views of received payloads stay valid.
  void stop() noexcept;

  // Memory of the slots, for callers that pin it.
  const MappedRegion& slots() const noexcept { return data_region_; }

 private:
  struct Assembled;

  bool take_next(Completions& into);
  void read(const Entry& entry, Message* message, unsigned* slot, std::uint32_t* flags) const;
  void check_entry(const Message& message, unsigned slot) const;
  void deliver(const Message& message, unsigned slot, std::uint32_t flags, Completions& into);
  DeviceSlots::Importer importer() const noexcept;
  void add_piece(const Message& message, unsigned slot, Completions& into);
  void give_back(unsigned slot) noexcept;
  void tell_loss() noexcept;
  static void release(void* owner, std::uint64_t token) noexcept;
  static void release_on_device(void* owner, std::uint64_t token) noexcept;

  const std::shared_ptr<ChannelState> channel_state_;
  const Offer layout_;  // already checked
  const MappedRegion control_region_;
  const MappedRegion data_region_;
  Control* const control_;
  const Entry* const entries_;
  const ScopedFd credit_fd_;
  const bool flush_computed_;

  // Used only by the polling thread.
  Assembler assembler_;
  std::uint64_t taken_ = 0;     // number of entries taken so far
  std::uint64_t sequence_ = 0;  // number of the next message
  bool finished_ = false;

  // For each slot, the number of bytes to flush when the slot is returned. Written before the lease
  // of the slot is handed out. The values are atomic, because a faulty sender might reuse a slot
  // before its previous lease was returned.
  std::array<std::atomic<std::uint32_t>, kMostSlots> flush_bytes_{};
  std::atomic<unsigned> num_held_{0};  // slots with views
  std::atomic<bool> lost_{false};
  std::mutex reason_mutex_;
  std::string reason_;
  // Reassembled messages that still exist; at most as many as there are slots.
  std::atomic<unsigned> num_assembled_{0};
  std::atomic<bool> stalled_{false};     // a message waits for the end of one of them
  std::unique_ptr<DeviceSlots> device_;  // last, because its thread returns slots
};

}  // namespace adaptive::shm
