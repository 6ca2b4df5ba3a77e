// The sending end of a channel whose payloads are in the memory of a GPU: brings them to the
// peer's, in their order, and says so when they are there.
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

// A thread copies one payload at a time: it waits for a slot, puts the copy on its own stream,
// behind what computes the payload, and publishes the message when the device is done with it. The
// channel sends nothing else meanwhile but through it.
class DeviceSender {
 public:
  // `outgoing` outlives it.
  DeviceSender(std::shared_ptr<ChannelState> channel_state, Outgoing& outgoing,
               std::shared_ptr<const cuda::Context> context, cuda::PeerArena peer,
               cuda::Stream stream, std::size_t slot_bytes);
  DeviceSender(const DeviceSender&) = delete;
  DeviceSender& operator=(const DeviceSender&) = delete;
  ~DeviceSender();  // drops what is not on its way

  // See Sender::send_after(). One thread.
  void send(const Message& message, const void* data, bool on_device, void* stream,
            const Keeper& keeper);
  // Until all of it is published or handed to `outgoing`. False when the deadline passed.
  bool flush(const Deadline& deadline);
  std::size_t pending() const noexcept { return num_jobs_.load(std::memory_order_relaxed); }
  // Ends the channel, and lets go of the peer's memory, after what is there.
  void close() noexcept;

 private:
  struct Job {
    Message message;
    const void* data = nullptr;
    bool on_device = false;
    cuda::Event ready;  // recorded behind what makes the payload
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

  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::deque<Job> jobs_;  // the first is being carried
  std::vector<cuda::Event> spare_events_;
  bool closing_ = false;
  std::atomic<bool> stopping_{false};
  std::atomic<std::size_t> num_jobs_{0};
  std::optional<Deadline> limit_;  // of the thread: once it is to stop
  std::thread thread_;             // last: it uses all of it
};

}  // namespace adaptive::shm
