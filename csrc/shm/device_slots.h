// The receiving end of a channel with payloads in GPU memory. It tracks which streams still read
// its slots.
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

// A thread returns each slot when the streams that read it have finished. The sender may then write
// to the slot immediately, and is not blocked if this process exits.
class DeviceSlots final : public DevicePayload {
 public:
  // State of the sender, which has opened the slots. A lost sender keeps them open until its
  // process exits.
  enum class Importer { kThere, kClosed, kLost };

  // `sender` is a descriptor of the sender's process, and may be empty. `give_back` is called when
  // a slot may be written again, `importer` by the destructor, and `failed` with a reason if the
  // device failed. The functions may be called from any thread.
  DeviceSlots(cuda::Arena arena, ScopedFd sender, std::function<void(unsigned)> give_back,
              std::function<Importer()> importer, std::function<void(const char*)> failed);
  DeviceSlots(const DeviceSlots&) = delete;
  DeviceSlots& operator=(const DeviceSlots&) = delete;
  // Waits up to some seconds until no stream reads a slot and the sender has closed the slots. If
  // the wait fails, the memory is freed only when the process exits. No view of a slot may exist.
  ~DeviceSlots() override;

  std::byte* data(unsigned slot) const noexcept {
    return reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(arena_.slot(slot)));
  }
  std::size_t size_bytes() const noexcept { return arena_.size_bytes(); }

  // Allows `stream` to read a view of the slot. Throws Error.
  void enter(unsigned slot, void* stream) override;
  // Must be called when no more work that reads the slot will be queued on its stream. May be
  // called from any thread.
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
  cuda::Stream waiting_;  // used by the thread to wait for other streams
  std::array<std::atomic<cuda::StreamHandle*>, kMostSlots> streams_{};
  std::array<std::atomic<bool>, kMostSlots> entered_{};

  std::mutex mutex_;  // guards the following members
  std::condition_variable changed_;
  std::deque<unsigned> leaving_;
  bool stopping_ = false;
  bool stuck_ = false;  // the device did not finish with a slot
  std::thread thread_;  // last, because it uses all other members
};

}  // namespace adaptive::shm
