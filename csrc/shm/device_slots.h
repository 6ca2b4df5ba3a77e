// The receiving end of a channel in the memory of a GPU: who reads its slots, and until when.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "common/completions.h"
#include "common/deadline.h"
#include "common/scoped_fd.h"
#include "cuda/arena.h"
#include "shm/ring.h"

namespace adaptive::shm {

// A slot goes back when the streams that read it are past that, which a thread watches: the sender
// may then write to it at once, and would not be held up if this process ended.
class DeviceSlots final : public DevicePayload {
 public:
  // The sender, which has the slots open. One that is lost has until its process has ended.
  enum class Importer { kThere, kClosed, kLost };

  // sender: its process, may be empty. give_back: the slot may be written to again. importer: asked
  // by the destructor. failed: the device has, with a reason. All may be called by any thread.
  DeviceSlots(cuda::Arena arena, ScopedFd sender, std::function<void(unsigned)> give_back,
              std::function<Importer()> importer, std::function<void(const char*)> failed);
  DeviceSlots(const DeviceSlots&) = delete;
  DeviceSlots& operator=(const DeviceSlots&) = delete;
  // Waits until nothing reads a slot and the sender has let go of them; what is not so within
  // seconds is left to the end of the process. No slot may be out.
  ~DeviceSlots() override;

  std::byte* data(unsigned slot) const noexcept {
    return reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(arena_.slot(slot)));
  }
  std::size_t size_bytes() const noexcept { return arena_.size_bytes(); }

  // A view of the slot is to be read on `stream`; throws Error.
  void enter(unsigned slot, void* stream) override;
  // Nobody will read the slot later than what is on that stream now. Any thread.
  void leave(unsigned slot) noexcept;

 private:
  void run() noexcept;
  bool is_let_go(const Deadline& deadline) const;
  bool return_first(std::unique_lock<std::mutex>& lock);

  cuda::Arena arena_;
  const ScopedFd sender_;
  const std::function<void(unsigned)> give_back_;
  const std::function<Importer()> importer_;
  const std::function<void(const char*)> failed_;
  cuda::Stream waiting_;  // of the thread, for what it waits for
  std::array<std::atomic<cuda::StreamHandle*>, kMostSlots> streams_{};
  std::array<std::atomic<bool>, kMostSlots> entered_{};

  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::deque<unsigned> leaving_;
  bool stopping_ = false;
  bool stuck_ = false;  // the device did not come to an end with a slot
  std::thread thread_;  // last: it uses all of it
};

}  // namespace adaptive::shm
