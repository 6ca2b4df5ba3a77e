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

// Lives as long as the last view of one of its slots. Nothing in the shared memory is trusted:
// whatever is acted upon is copied out first and checked then.
class Incoming final : public Source, public std::enable_shared_from_this<Incoming> {
 public:
  Incoming(std::shared_ptr<ChannelState> channel_state, std::uint64_t limit_bytes,
           const Offer& layout, MappedRegion control, MappedRegion data, ScopedFd credit_fd,
           bool flush_computed);

  ~Incoming() override;

  // From now on payloads may be in `arena`. Before the first poll().
  void use_device(cuda::Arena arena, ScopedFd sender);

  bool poll(Completions& into) noexcept override;

  // The peer is gone, or silent for too long: a Failure follows what it had sent.
  void lose(const std::string& reason) noexcept;

  // Nothing is read any more; the peer is told. Views stay valid.
  void stop() noexcept;

  // Where the slots are, for who wants to pin them.
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
  const Offer layout_;  // checked
  const MappedRegion control_region_;
  const MappedRegion data_region_;
  Control* const control_;
  const Entry* const entries_;
  const ScopedFd credit_fd_;
  const bool flush_computed_;

  // Of the thread that polls.
  Assembler assembler_;
  std::uint64_t taken_ = 0;     // entries
  std::uint64_t sequence_ = 0;  // of the message that is due
  bool finished_ = false;

  // By slot: bytes to flush when it comes back. Written before its lease is handed out; that this
  // is after the lease before has come back, only the sender's process knows for sure.
  std::array<std::atomic<std::uint32_t>, kMostSlots> flush_bytes_{};
  std::atomic<unsigned> num_held_{0};  // slots with views
  std::atomic<bool> lost_{false};
  std::mutex reason_mutex_;
  std::string reason_;
  // Messages put together that nobody has dropped: as many at most as there are slots.
  std::atomic<unsigned> num_assembled_{0};
  std::atomic<bool> stalled_{false};     // a message waits for one of them
  std::unique_ptr<DeviceSlots> device_;  // last: its thread gives slots back
};

}  // namespace adaptive::shm
