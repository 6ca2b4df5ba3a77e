// The sending end of a channel with payloads in GPU memory. It copies the payloads in order to the
// peer's GPU, and publishes each message when its copy has finished.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "common/channel_state.h"
#include "cuda/arena.h"
#include "shm/outgoing.h"

namespace adaptive::shm {

// A thread copies one payload at a time. It waits for a slot, queues the copy on its own stream so
// that it runs after the payload has been computed, and publishes the message when the copy has
// finished. The channel sends all its messages through this thread.
class DeviceSender {
 public:
  // `outgoing` must outlive this object.
  DeviceSender(std::shared_ptr<ChannelState> channel_state, Outgoing& outgoing,
               std::shared_ptr<const cuda::Context> context, cuda::PeerArena peer,
               cuda::Stream stream, std::size_t slot_bytes);
  DeviceSender(const DeviceSender&) = delete;
  DeviceSender& operator=(const DeviceSender&) = delete;
  ~DeviceSender();  // drops payloads whose copy has not begun

  // See Sender::send_after(). Must always be called from the same thread.
  void send(const Message& message, const void* data, bool on_device, void* stream,
            const Keeper& keeper);
  // Waits until all messages are published or passed to `outgoing`. Returns false if the deadline
  // passed.
  bool flush(const Deadline& deadline);
  std::size_t pending() const noexcept { return num_jobs_.load(std::memory_order_relaxed); }
  // After all pending messages, closes the channel and releases the peer's memory.
  void close() noexcept;

 private:
  struct Job {
    Message message;
    const void* data = nullptr;
    bool on_device = false;
    cuda::Event ready;  // recorded after the work that computes the payload
    std::shared_ptr<void> owner;
  };

  void run() noexcept;
  void carry_all(std::unique_lock<std::mutex>& lock);
  void carry(Job& job);
  void copy(Job& job, unsigned slot);
  bool overdue();
  cuda::Event take_event();

  const std::shared_ptr<ChannelState> channel_state_;
  Outgoing& outgoing_;
  const std::shared_ptr<const cuda::Context> context_;
  cuda::PeerArena peer_;
  const cuda::Stream stream_;
  const std::size_t slot_bytes_;

  std::mutex mutex_;  // guards the following members
  std::condition_variable changed_;
  std::deque<Job> jobs_;  // the first job is in progress
  std::vector<cuda::Event> spare_events_;
  bool closing_ = false;
  std::atomic<bool> stopping_{false};
  std::atomic<std::size_t> num_jobs_{0};
  std::optional<Deadline> limit_;  // used by the thread; set after it was asked to stop
  std::thread thread_;             // last, because it uses all other members
};

}  // namespace adaptive::shm
