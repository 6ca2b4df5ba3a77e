// One TCP channel in both directions: the socket, its reading threads, and its closing.
//
//   send() ──> Writer ──┐            ┌── poll(): the thread that waits
//                       ├── socket ──┤
//   reactor: EPOLLOUT ──┘            └── reactor: EPOLLIN, while nobody waits
//
// A thread that waits for arrivals reads the socket itself, because waking another thread would
// cost more than the network. While no thread waits, the reactor reads the socket, so that messages
// progress while the process computes.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "common/channel_state.h"
#include "common/fork_safe_fd.h"
#include "tcp/buffers.h"
#include "tcp/frame.h"
#include "tcp/writer.h"

namespace adaptive::tcp {

class Connection final : public Source,
                         private FrameSink,
                         public std::enable_shared_from_this<Connection> {
 public:
  // `mine` and `theirs` contain the slots and limits of this end and of the peer.
  Connection(const Session& session, int peer, ForkSafeFd socket, const Offer& mine,
             const Offer& theirs);

  void start();
  // Closes both directions; the peer sees a proper close if a goodbye was sent. After this returns,
  // this object may be used only to return leases.
  void shut() noexcept;

  Writer& writer() noexcept { return writer_; }
  const ChannelState& state() const noexcept { return state_; }
  // Throws the error that ended the channel, if there is one.
  void check() const;
  // Returns whether the peer has said that no message follows.
  bool peer_closed() const noexcept { return goodbye_came_.load(); }
  // Writes pending data. May be called from any thread.
  void pump() noexcept;

  bool poll(Completions& into) noexcept override;

 private:
  // Methods of FrameSink, called under read_mutex_:
  std::byte* begin(const Message& message) override;
  void complete(const Message& message) override;
  void credits(std::uint32_t count) override;
  void goodbye() override;

  void on_events(std::uint32_t events);
  void on_tick();
  // Reads data from the socket, unless another thread is reading. Arrivals are added directly to
  // `into`. If `into` is null, they are added to the session's completions, and the bell rings.
  bool receive(Completions* into, std::size_t budget_bytes) noexcept;
  bool leave_to_other(std::unique_lock<std::mutex>& reading) noexcept;
  void read_some(std::size_t budget_bytes);
  void on_end(int code);
  void watch(std::uint32_t events, bool on) noexcept;
  void end() noexcept;
  static void release(void* owner, std::uint64_t token) noexcept;
  void give_back(Block* block) noexcept;

  ChannelState state_;
  const Offer mine_;
  const std::chrono::milliseconds period_;  // time between heartbeats
  std::shared_ptr<Reactor> reactor_;
  ForkSafeFd socket_;
  BufferPool buffers_;
  Writer writer_;
  std::uint64_t timer_ = 0;

  std::mutex events_mutex_;
  std::uint32_t events_ = 0;

  std::mutex read_mutex_;  // try_lock only, except in shut()
  FrameDecoder decoder_;
  std::unique_ptr<Block> block_;       // memory of the incoming message
  std::atomic<unsigned> num_held_{0};  // number of slots in use; arrivals point to it
  Completions* into_ = nullptr;
  bool delivered_ = false;
  std::atomic<bool> left_to_other_{false};  // the reactor was called while the waiter was reading
  std::atomic<bool> goodbye_came_{false};
  std::atomic<bool> credits_came_{false};
  std::atomic<std::int64_t> next_look_ns_{0};

  std::atomic<bool> heard_{false};
  int silent_ticks_ = 0;  // used by the reactor's thread, like the next member
  std::chrono::steady_clock::time_point heard_at_ = std::chrono::steady_clock::now();

  std::atomic<bool> over_{false};  // no more data will be read
};

}  // namespace adaptive::tcp
