// Owners of what the driver hands out. All but Context are move-only; destructors never throw.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "cuda/driver.h"

namespace adaptive::cuda {

// The primary context of a device, which torch and this code share: addresses, streams and events
// of one are good for the other.
class Context {
 public:
  Context(std::shared_ptr<const Driver> driver, int ordinal);
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  ~Context();

  const Driver& driver() const noexcept { return *driver_; }
  const Api& api() const noexcept { return driver_->api(); }
  Device device() const noexcept { return device_; }
  ContextHandle* handle() const noexcept { return handle_; }

 private:
  const std::shared_ptr<const Driver> driver_;
  Device device_;
  ContextHandle* handle_ = nullptr;
};

// Makes a context current on this thread as long as it lives; calls of the driver need that.
class Current {
 public:
  explicit Current(const Context& context);  // throws Error
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  ~Current();

 private:
  const Context& context_;
};

// One thing of a context, destroyed with the context current. `destroy` does what the driver wants.
template <typename Handle, Result (*Api::*destroy)(Handle)>
class Owned {
 public:
  Owned() noexcept = default;
  Owned(std::shared_ptr<const Context> context, Handle handle) noexcept
      : context_(std::move(context)), handle_(handle) {}
  Owned(Owned&& other) noexcept
      : context_(std::move(other.context_)), handle_(std::exchange(other.handle_, Handle{})) {}
  Owned& operator=(Owned&& other) noexcept {
    if (this != &other) {
      reset();
      context_ = std::move(other.context_);
      handle_ = std::exchange(other.handle_, Handle{});
    }
    return *this;
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() { reset(); }

  Handle get() const noexcept { return handle_; }
  const Context& context() const noexcept { return *context_; }
  const std::shared_ptr<const Context>& shared_context() const noexcept { return context_; }

  // A driver that is shutting down refuses; then there is nothing left to destroy.
  void reset() noexcept {
    if (handle_ != Handle{}) {
      try {
        const Current current(*context_);
        (context_->api().*destroy)(handle_);
      } catch (...) {
      }
      handle_ = Handle{};
    }
    context_.reset();
  }

  // Leaves it to the end of the process: for what a device may still use.
  void leak() noexcept {
    handle_ = Handle{};
    context_.reset();
  }

 private:
  std::shared_ptr<const Context> context_;
  Handle handle_{};
};

using Stream = Owned<StreamHandle*, &Api::stream_destroy>;
using Event = Owned<EventHandle*, &Api::event_destroy>;
using Memory = Owned<Address, &Api::mem_free>;
using PeerMemory = Owned<Address, &Api::ipc_close_mem>;  // of another process

// All of these need the context to be current, and throw Error.
Stream make_stream(const std::shared_ptr<const Context>& context);
Event make_event(const std::shared_ptr<const Context>& context, bool between_processes);
Event open_event(const std::shared_ptr<const Context>& context, const EventExport& handle);
EventExport export_event(const Event& event);
Memory allocate(const std::shared_ptr<const Context>& context, std::size_t size_bytes);
PeerMemory open_memory(const std::shared_ptr<const Context>& context, const MemoryExport& handle);
MemoryExport export_memory(const Memory& memory);

void record(const Event& event, StreamHandle* stream);
void wait(StreamHandle* stream, const Event& event);
void copy(const Context& context, Address to, Address from, std::size_t size_bytes,
          StreamHandle* stream);
bool is_done(const Event& event);

// Sleeps until the driver says that `event` is done; false when `given_up` says so, which is asked
// some times a second. `stream` is the caller's own and may be held up by that: it waits for the
// event, and the driver calls back when it is past that. A sleep of the driver's own could not be
// ended by anything but the device.
bool await(const Event& event, StreamHandle* stream, const std::function<bool()>& given_up);

}  // namespace adaptive::cuda
