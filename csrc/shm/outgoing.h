// The sending end of a directed channel.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "common/channel_state.h"
#include "common/fork_guard.h"
#include "common/futex.h"
#include "shm/channel.h"
#include "shm/ring.h"
#include "shm/segment.h"

namespace adaptive::shm {

// The memory of the slots and the state that views of reserved slots need. Lives until the last
// such view is destroyed.
struct OutgoingMemory {
  OutgoingMemory(const ShmOptions& options, const std::string& purpose, const Deadline& deadline,
                 const Tick& tick);

  Control* control() const noexcept {
    return reinterpret_cast<Control*>(control_segment.region.data());
  }
  Entry* entries() const noexcept {
    return reinterpret_cast<Entry*>(control_segment.region.data() + sizeof(Control));
  }
  std::byte* slot(unsigned index) const noexcept {
    return data_segment.region.data() + index * slot_stride;
  }

  // Lease::Release function for reserved slots.
  static void drop_view(void* owner, std::uint64_t slot) noexcept;

  std::size_t num_entries;
  std::size_t slot_stride;
  Segment control_segment;
  Segment data_segment;
  ScopedFd credit_fd;                  // readable when a requested slot was returned
  std::atomic<std::uint64_t> gone{0};  // slots whose view in this process was dropped
  ForkGuard guard;
};

// A slot is free if it is in none of these states (the right column says when a state ends):
//   out       the receiver may read it          until `returned`
//   viewed    a reserved tensor uses it         until `gone`
//   reserved  a payload is computed into it     until commit(), or `gone` without it
//   queued    committed, but behind messages    until it is sent
class Outgoing {
 public:
  Outgoing(const Session& session, std::shared_ptr<ChannelState> channel_state,
           const ShmOptions& options, std::shared_ptr<OutgoingMemory> memory);

  // Descriptors from the peer: its bell, and the descriptor that wakes its reactor.
  void connect(Bell bell, ScopedFd wake_fd, std::size_t stream_from_bytes,
               std::function<void()> on_end);

  void send(Message& message, const void* data, const Keeper& keeper);
  std::optional<Reserved> reserve(std::size_t nbytes);
  void commit(Message& message, std::uint64_t token);
  // Throws the errors that send() would throw for this message.
  void admit(Message message);
  // Waits for a slot for `message`, which is the next message to send. Returns kNoSlot if
  // `given_up` returns true. After getting a slot, the caller must call publish_on_device(), unless
  // the channel failed.
  unsigned await_slot(const Message& message, const std::function<bool()>& given_up);
  // Publishes that the payload is in the given slot of the peer's device memory.
  void publish_on_device(Message& message, unsigned slot);
  // Returns whether the peer has closed its end. By then, the peer has written all its messages.
  bool receiver_closed() const noexcept;
  // Tells the peer that this end has closed the memory that the peer exported from its device.
  void tell_device_closed() noexcept { control_->sender.device_closed.store(1); }
  bool flush(const Deadline& deadline);
  std::size_t pending() const noexcept { return num_pending_.load(std::memory_order_relaxed); }
  void close() noexcept;

  // Called on the reactor's thread if the credit descriptor is readable.
  void on_credit() noexcept;
  // Drops waiting messages after the channel broke. May be called from any thread.
  void abandon() noexcept;

 private:
  struct Pending {
    Message message;
    const std::byte* data = nullptr;
    std::uint64_t offset = 0;
    unsigned slot = kNoSlot;  // a committed slot, instead of data
    std::shared_ptr<void> owner;
  };
  using Owners = std::vector<std::shared_ptr<void>>;  // must be destroyed without the mutex

  void prepare(Message& message) const;
  void gather() noexcept;
  unsigned take_slot() noexcept;
  unsigned take_slot_soon(std::size_t size_bytes) noexcept;
  void publish(const Message& message, unsigned slot, std::uint32_t flags) noexcept;
  void copy_in(unsigned slot, const std::byte* from, std::size_t size_bytes) const noexcept;
  bool move_on(Pending& pending) noexcept;
  bool ask_for_credit(const Pending& first) noexcept;
  void advance(Owners& done);
  void queue(Pending&& pending);
  void drop_backlog(Owners& done) noexcept;
  void publish_end() noexcept;

  const std::shared_ptr<ChannelState> channel_state_;
  const ShmOptions options_;
  const std::shared_ptr<OutgoingMemory> memory_;
  Control* const control_;
  Entry* const entries_;
  const std::uint64_t all_slots_;
  const bool crowded_;  // more busy processes than processors

  std::mutex mutex_;  // guards all following members
  std::condition_variable moved_;
  std::optional<Bell> bell_;
  ScopedFd wake_fd_;
  std::size_t stream_from_bytes_ = 0;
  std::function<void()> on_end_;
  std::uint64_t free_;
  std::uint64_t out_ = 0, viewed_ = 0, reserved_ = 0, queued_ = 0;
  std::array<std::uint64_t, kMostSlots> reservations_{};  // last token of each slot
  std::uint64_t last_reservation_ = 0;
  std::uint64_t published_ = 0;
  std::uint64_t sequence_ = 0;
  std::deque<Pending> backlog_;
  std::atomic<std::size_t> num_pending_{0};
  SpinBudget spin_;
  bool closed_ = false;
  bool end_published_ = false;
};

}  // namespace adaptive::shm
