#include "shm/device_slots.h"

#include <poll.h>

#include <chrono>
#include <exception>
#include <utility>

#include "common/deadline.h"

namespace adaptive::shm {
namespace {

constexpr std::chrono::seconds kDeviceEnds(10);
constexpr std::chrono::seconds kSenderLetsGo(2);
constexpr std::chrono::milliseconds kLookUp(1);

cuda::Stream make_stream_of(const cuda::Arena& arena) {
  const cuda::Current current(arena.context());
  return cuda::make_stream(arena.shared_context());
}

}  // namespace

DeviceSlots::DeviceSlots(cuda::Arena arena, ScopedFd sender,
                         std::function<void(unsigned)> give_back,
                         std::function<Importer()> importer,
                         std::function<void(const char*)> failed)
    : arena_(std::move(arena)),
      sender_(std::move(sender)),
      give_back_(std::move(give_back)),
      importer_(std::move(importer)),
      failed_(std::move(failed)),
      waiting_(make_stream_of(arena_)),
      thread_([this] { run(); }) {}

DeviceSlots::~DeviceSlots() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
  if (!is_let_go(Deadline::after(kSenderLetsGo)) || stuck_) {
    arena_.leak();
  }
  if (stuck_) {
    waiting_.leak();
  }
}

// Returns whether the sender has stopped using the slots. If the sender is lost, waits until its
// process has exited, because its socket may close some time before its device stops.
bool DeviceSlots::is_let_go(const Deadline& deadline) const {
  while (importer_() == Importer::kThere && !deadline.expired()) {
    std::this_thread::sleep_for(kLookUp);
  }
  if (importer_() != Importer::kLost || !sender_) {
    return importer_() == Importer::kClosed;
  }
  pollfd process{sender_.get(), POLLIN, 0};
  return ::poll(&process, 1, deadline.remaining_ms()) > 0;
}

void DeviceSlots::enter(unsigned slot, void* stream) {
  auto* const handle = static_cast<cuda::StreamHandle*>(stream);
  const cuda::Current current(arena_.context());
  cuda::wait(handle, arena_.written(slot));
  streams_[slot].store(handle, std::memory_order_relaxed);
  entered_[slot].store(true, std::memory_order_release);
}

void DeviceSlots::leave(unsigned slot) noexcept {
  try {
    if (!entered_[slot].exchange(false, std::memory_order_acquire)) {
      give_back_(slot);  // no stream has read it
      return;
    }
    const cuda::Current current(arena_.context());
    cuda::record(arena_.consumed(slot), streams_[slot].load(std::memory_order_relaxed));
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      leaving_.push_back(slot);
    }
    changed_.notify_all();
  } catch (const std::exception& error) {
    failed_(error.what());  // the slot cannot be reused, so the channel has failed
  }
}

void DeviceSlots::run() noexcept {
  try {
    const cuda::Current current(arena_.context());
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return stopping_ || !leaving_.empty(); });
      if (leaving_.empty()) {
        return;
      }
      if (!return_first(lock)) {
        stuck_ = true;
        return;
      }
    }
  } catch (const std::exception& error) {
    const std::lock_guard<std::mutex> lock(mutex_);
    stuck_ = true;
    failed_(error.what());
  }
}

// Returns false if the device did not finish in time. There is a time limit only when this end
// stops; before that, computations may take any time.
bool DeviceSlots::return_first(std::unique_lock<std::mutex>& lock) {
  const unsigned slot = leaving_.front();
  leaving_.pop_front();
  lock.unlock();
  std::optional<Deadline> limit;
  const bool done = cuda::await(arena_.consumed(slot), waiting_.get(), [&] {
    if (!limit) {
      const std::lock_guard<std::mutex> guard(mutex_);
      if (stopping_) {
        limit = Deadline::after(kDeviceEnds);
      }
    }
    return limit && limit->expired();
  });
  if (done) {
    give_back_(slot);
  }
  lock.lock();
  return done;
}

}  // namespace adaptive::shm
