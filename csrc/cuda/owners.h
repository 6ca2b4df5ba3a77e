// Classes that own the driver's objects. All except Context are move-only; destructors never throw.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "cuda/driver.h"

namespace adaptive::cuda {

// The primary context of a device. torch uses the same context, so addresses, streams and events
// can be exchanged with torch.
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

// Makes a context current on this thread for the lifetime of this object. Most calls of the driver
// need a current context.
class Current {
 public:
  explicit Current(const Context& context);  // throws Error
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  ~Current();

 private:
  const Context& context_;
};

// An object that belongs to a context. `destroy` is called while the context is current.
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

  // Errors are ignored: a driver that is shutting down returns an error, and has no object left to
  // destroy.
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

  // Keeps the object until the process exits, because a device may still use it.
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
using PeerMemory = Owned<Address, &Api::ipc_close_mem>;  // memory of another process

// These functions require that the context is current, and throw Error.
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

// Sleeps until `event` is done. Calls `given_up` several times a second, and returns false as soon
// as it returns true. `stream` is a stream of the caller that may be blocked: it waits for the
// event, and the driver then calls back. The driver's own function that waits for an event is not
// used, because it cannot be interrupted.
bool await(const Event& event, StreamHandle* stream, const std::function<bool()>& given_up);

}  // namespace adaptive::cuda
