// The sending half of a TCP channel: what waits to be written, credits, and the one frame that is
// half written. Whoever has something to write tries it at once, so that a small message costs no
// change of threads; what the socket does not take, the reactor writes later.
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

// All methods may be called from any thread; send() from one at a time.
class Writer {
 public:
  // `want_write(true)` asks for a call of pump() when the socket is writable; called by whoever
  // writes, never from two threads at a time. `credits`: messages that the peer has room for;
  // `slots`: those that this end has room for.
  Writer(int socket, std::uint32_t credits, std::uint32_t slots,
         std::function<void(bool)> want_write);

  // Queues a message and writes what the socket takes. Throws Error after stop().
  void send(const Message& message, const void* data, const Keeper& keeper);

  // The peer has room for so many more. Throws Error for more than it can have.
  void add_credits(std::uint32_t count);
  // A message of the peer takes a slot; false when it should have known that there is none.
  bool use_slot();
  // A slot is free. The peer hears of it with the next frame, and where it has half of the slots
  // or less, with one made for this: true then, and pump() is to be called.
  bool free_slot();

  // Asks for a frame that says nothing, if none was written since the last call.
  void beat();
  // Asks for a goodbye after all messages.
  void say_goodbye();

  // Writes up to about budget_bytes.
  void pump(std::size_t budget_bytes = kReactorBytes);

  // False when the deadline passed; throws Error when stopped with messages left.
  bool wait_empty(const Deadline& deadline);
  std::size_t unsent() const noexcept { return unsent_.load(std::memory_order_relaxed); }

  // Lets go of everything that was not written. After the return the socket is not used any more.
  void stop() noexcept;
  // errno of the write that failed, 0 if none did. The reader learns of the same end.
  int broken() const noexcept { return broken_.load(); }

 private:
  static constexpr std::size_t kReactorBytes = std::size_t{4} << 20;

  struct Waiting {
    Message message;
    const std::byte* data = nullptr;
    std::shared_ptr<void> owner;
  };
  // Owners may run code of others when they go: never under a lock.
  using Owners = std::vector<std::shared_ptr<void>>;

  // Under write_mutex_:
  void write_some(std::size_t budget_bytes, Owners& done);
  bool next_frame();
  void set_frame(FrameType type, std::uint32_t credits);
  void finish_frame(Owners& done);
  bool write_frame(std::size_t& budget_bytes);  // false when it is not whole yet
  void set_want(bool want);
  void keep_last(const Keeper& keeper);

  void push(Waiting waiting);
  bool work_due();
  bool has_work();  // that nobody is going to do

  const int socket_;
  const std::uint32_t peer_slots_;
  const std::uint32_t slots_;
  const std::function<void(bool)> want_write_;
  std::atomic<std::size_t> unsent_{0};
  std::atomic<int> broken_{0};
  std::atomic<bool> wants_{false};
  std::atomic<bool> wrote_{false};

  // Held while writing; only tried by those who would otherwise wait for a long copy.
  std::mutex write_mutex_;
  std::unique_ptr<Waiting> current_;  // begun, not finished
  std::uint64_t written_bytes_ = 0;   // of its payload, in frames that are done
  std::array<std::byte, kFrameBytes + sizeof(Message)> head_{};
  std::size_t head_bytes_ = 0;
  std::size_t head_done_ = 0;
  const std::byte* body_ = nullptr;
  std::size_t body_bytes_ = 0;
  std::size_t body_done_ = 0;
  bool frame_is_goodbye_ = false;

  std::mutex queue_mutex_;  // taken after write_mutex_, for moments
  std::condition_variable emptied_;
  std::deque<Waiting> queue_;
  std::uint32_t credits_;
  std::uint32_t used_slots_ = 0;    // of this end, as the peer knows it
  std::uint32_t owed_credits_ = 0;  // of those, free again
  bool control_due_ = false;
  bool goodbye_due_ = false;
  bool goodbye_said_ = false;
  bool stopped_ = false;
};

}  // namespace adaptive::tcp
