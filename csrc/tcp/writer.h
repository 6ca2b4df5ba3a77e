// The sending half of a TCP channel: waiting messages, credits, and the partly written frame. A
// thread that has data first tries to write it itself, so that a small message needs no other
// thread. The reactor later writes the data that the socket did not accept.
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
#include <vector>

#include "common/channel.h"
#include "common/deadline.h"
#include "common/message.h"
#include "tcp/frame.h"

namespace adaptive::tcp {

// All methods may be called from any thread; send() only from one thread at a time.
class Writer {
 public:
  // `want_write(true)` requests a call of pump() when the socket becomes writable. Writing threads
  // call `want_write`, but never two of them at the same time. `credits` is the number of free
  // slots at the peer, and `slots` is the number of slots at this end.
  Writer(int socket, std::uint32_t credits, std::uint32_t slots,
         std::function<void(bool)> want_write);

  // Queues a message and writes the data that the socket accepts. Throws Error after stop().
  void send(const Message& message, const void* data, const Keeper& keeper);

  // Adds credits from the peer. Throws Error if there are more credits than slots.
  void add_credits(std::uint32_t count);
  // Takes a slot for a message from the peer. Returns false if no slot is free; the peer has then
  // broken the rules, because it knows the number of free slots.
  bool use_slot();
  // Frees a slot. The next frame reports it to the peer. If the peer counts at least half of the
  // slots as used, a separate frame is queued for the report. In this case, the method returns
  // true, and the caller must call pump().
  bool free_slot();

  // Requests an empty frame (a heartbeat) if no frame was written since the last call.
  void beat();
  // Requests a goodbye after all messages.
  void say_goodbye();

  // Writes up to about budget_bytes.
  void pump(std::size_t budget_bytes = kReactorBytes);

  // Returns false if the deadline passed. Throws Error if the writer was stopped with unsent
  // messages.
  bool wait_empty(const Deadline& deadline);
  std::size_t unsent() const noexcept { return unsent_.load(std::memory_order_relaxed); }

  // Drops all unwritten data. After this returns, the socket is not used any more.
  void stop() noexcept;
  // Returns errno of the failed write, or 0 if no write failed. The reader notices the same
  // failure.
  int broken() const noexcept { return broken_.load(); }

 private:
  static constexpr std::size_t kReactorBytes = std::size_t{4} << 20;

  struct Waiting {
    Message message;
    const std::byte* data = nullptr;
    std::shared_ptr<void> owner;
  };
  // Destroying an owner may run the caller's code, so owners must not be destroyed under a lock.
  using Owners = std::vector<std::shared_ptr<void>>;

  // Methods that must be called under write_mutex_:
  void write_some(std::size_t budget_bytes, Owners& done);
  bool next_frame();
  void set_frame(FrameType type, std::uint32_t credits);
  void finish_frame(Owners& done);
  bool write_frame(std::size_t& budget_bytes);  // false if it is not written completely
  void set_want(bool want);
  void keep_last(const Keeper& keeper);

  void push(Waiting waiting);
  bool work_due();
  bool has_work();  // whether there is work that no other thread will do

  const int socket_;
  const std::uint32_t peer_slots_;
  const std::uint32_t slots_;
  const std::function<void(bool)> want_write_;
  std::atomic<std::size_t> unsent_{0};
  std::atomic<int> broken_{0};
  std::atomic<bool> wants_{false};
  std::atomic<bool> wrote_{false};

  // Held while writing. Threads that must not wait for a long copy use try_lock().
  std::mutex write_mutex_;
  std::unique_ptr<Waiting> current_;  // a started message
  std::uint64_t written_bytes_ = 0;   // written part of current_'s payload, in complete frames
  std::array<std::byte, kFrameBytes + sizeof(Message)> head_{};
  std::size_t head_bytes_ = 0;
  std::size_t head_done_ = 0;
  const std::byte* body_ = nullptr;
  std::size_t body_bytes_ = 0;
  std::size_t body_done_ = 0;
  bool frame_is_goodbye_ = false;

  std::mutex queue_mutex_;  // taken after write_mutex_, only briefly
  std::condition_variable emptied_;
  std::deque<Waiting> queue_;
  std::uint32_t credits_;
  std::uint32_t used_slots_ = 0;    // slots of this end that the peer counts as used
  std::uint32_t owed_credits_ = 0;  // free again, but not reported yet
  bool control_due_ = false;
  bool goodbye_due_ = false;
  bool goodbye_said_ = false;
  bool stopped_ = false;
};

}  // namespace adaptive::tcp
