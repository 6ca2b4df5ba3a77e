#include "shm/device_sender.h"

#include <chrono>
#include <string>
#include <utility>

#include "common/error.h"

namespace adaptive::shm {
namespace {

constexpr std::chrono::seconds kDeviceEnds(10);

std::shared_ptr<void> owner_of(void* context) {
  return std::move(*static_cast<std::shared_ptr<void>*>(context));
}

}  // namespace

DeviceSender::DeviceSender(std::shared_ptr<ChannelState> channel_state, Outgoing& outgoing,
                           std::shared_ptr<const cuda::Context> context, cuda::PeerArena peer,
                           cuda::Stream stream, std::size_t slot_bytes)
    : channel_state_(std::move(channel_state)),
      outgoing_(outgoing),
      context_(std::move(context)),
      peer_(std::move(peer)),
      stream_(std::move(stream)),
      slot_bytes_(slot_bytes),
      thread_([this] { run(); }) {}

DeviceSender::~DeviceSender() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_.store(true);
  }
  changed_.notify_all();
  thread_.join();
}

void DeviceSender::send(const Message& message, const void* data, bool on_device, void* stream,
                        const Keeper& keeper) {
  outgoing_.admit(message);
  if (on_device && message.nbytes > slot_bytes_) {
    throw Error(describe(message) + " has " + std::to_string(message.nbytes) +
                " bytes in device memory, more than a slot, " + std::to_string(slot_bytes_) +
                ": copy it to the host first");
  }
  Job job;
  job.message = message;
  job.data = data;
  job.on_device = on_device;
  const cuda::Current current(*context_);
  job.ready = take_event();
  cuda::record(job.ready, static_cast<cuda::StreamHandle*>(stream));
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closing_) {
    throw Error(describe(message) + " cannot be sent to " + channel_state_->peer_name() +
                ": this end of the channel is closed");
  }
  jobs_.push_back(std::move(job));
  if (keeper.make != nullptr) {
    try {
      jobs_.back().owner = keeper.make(keeper.context);
    } catch (...) {
      jobs_.pop_back();
      throw;
    }
  }
  num_jobs_.store(jobs_.size(), std::memory_order_relaxed);
  changed_.notify_all();
}

bool DeviceSender::flush(const Deadline& deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  const bool done = changed_.wait_for(lock, std::chrono::milliseconds(deadline.remaining_ms()),
                                      [this] { return jobs_.empty(); });
  channel_state_->check();
  return done;
}

void DeviceSender::close() noexcept {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
}

cuda::Event DeviceSender::take_event() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!spare_events_.empty()) {
      cuda::Event event = std::move(spare_events_.back());
      spare_events_.pop_back();
      return event;
    }
  }
  return cuda::make_event(context_, false);
}

void DeviceSender::run() noexcept {
  try {
    const cuda::Current current(*context_);
    std::unique_lock<std::mutex> lock(mutex_);
    carry_all(lock);
  } catch (const std::exception& error) {
    channel_state_->fail(Failure::Kind::kTransport, "the device's end of the channel to " +
                                                        channel_state_->peer_name() +
                                                        " failed: " + error.what());
  }
  peer_ = {};
  outgoing_.tell_device_closed();
}

void DeviceSender::carry_all(std::unique_lock<std::mutex>& lock) {
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || closing_ || !jobs_.empty(); });
    if (jobs_.empty() && closing_) {
      break;
    }
    if (stopping_) {
      return;
    }
    Job& job = jobs_.front();  // its address stays valid while other jobs are added
    lock.unlock();
    try {
      carry(job);
    } catch (const PeerLostError&) {
      // The channel itself reports a lost peer.
    } catch (const std::exception& error) {
      channel_state_->fail(Failure::Kind::kTransport,
                           describe(job.message) + " could not be copied to " +
                               channel_state_->peer_name() + ": " + error.what());
    }
    std::shared_ptr<void> owner = std::move(job.owner);
    owner.reset();  // without the mutex, because its deleter may run the caller's code
    lock.lock();
    spare_events_.push_back(std::move(job.ready));
    jobs_.pop_front();
    num_jobs_.store(jobs_.size(), std::memory_order_relaxed);
    changed_.notify_all();
  }
  lock.unlock();
  outgoing_.close();
}

// Sends one payload. After a failure of the channel, only releases the job.
void DeviceSender::carry(Job& job) {
  const auto ended = [this] { return stopping_.load() || channel_state_->broken(); };
  if (!job.on_device) {
    if (cuda::await(job.ready, stream_.get(), ended)) {
      outgoing_.send(job.message, job.data, {&owner_of, &job.owner});
    }
    return;
  }
  const unsigned slot = outgoing_.await_slot(job.message, ended);
  if (slot == kNoSlot) {
    return;
  }
  copy(job, slot);
  outgoing_.publish_on_device(job.message, slot);
}

void DeviceSender::copy(Job& job, unsigned slot) {
  cuda::wait(stream_.get(), job.ready);
  cuda::wait(stream_.get(), peer_.consumed(slot));
  try {
    cuda::copy(*context_, peer_.slot(slot), reinterpret_cast<std::uintptr_t>(job.data),
               job.message.nbytes, stream_.get());
    cuda::record(peer_.written(slot), stream_.get());
    // The device needs the memory until the copy has finished, even if the channel has already
    // failed.
    if (!cuda::await(peer_.written(slot), stream_.get(), [this] { return overdue(); })) {
      throw Error("the device did not copy it in time");
    }
  } catch (...) {
    // The device may still read the memory, so it is kept until the process exits.
    static_cast<void>(new std::shared_ptr<void>(std::move(job.owner)));
    throw;
  }
}

// Returns whether the device takes too long. There is a time limit only after this end was asked to
// stop.
bool DeviceSender::overdue() {
  if (stopping_.load() && !limit_) {
    limit_ = Deadline::after(kDeviceEnds);
  }
  return limit_ && limit_->expired();
}

}  // namespace adaptive::shm
