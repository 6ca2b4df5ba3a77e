#include "cuda/owners.h"

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>

namespace adaptive::cuda {
namespace {

constexpr int kLooksAtOnce = 16;
constexpr std::chrono::milliseconds kLookUp(20);

// A position in a stream that a thread waits for. Shared with the driver, because the stream may
// reach the position after the thread has given up.
struct Place {
  std::mutex mutex;
  std::condition_variable changed;
  bool reached = false;
};

void reach(void* data) {
  const std::unique_ptr<std::shared_ptr<Place>> held(static_cast<std::shared_ptr<Place>*>(data));
  Place& place = **held;
  {
    const std::lock_guard<std::mutex> lock(place.mutex);
    place.reached = true;
  }
  place.changed.notify_all();
}

// Makes the driver wake the waiting thread after the work that is queued on the stream now.
std::shared_ptr<Place> mark(const Context& context, StreamHandle* stream) {
  auto place = std::make_shared<Place>();
  auto held = std::make_unique<std::shared_ptr<Place>>(place);
  context.driver().check(context.api().launch_host(stream, &reach, held.get()), "cuLaunchHostFunc",
                         "a wait of the channel");
  static_cast<void>(held.release());  // reach() deletes it
  return place;
}

}  // namespace

Context::Context(std::shared_ptr<const Driver> driver, int ordinal)
    : driver_(std::move(driver)), device_(driver_->device(ordinal)) {
  driver_->check(api().primary_ctx_retain(&handle_, device_), "cuDevicePrimaryCtxRetain",
                 std::to_string(device_));
}

Context::~Context() {
  api().primary_ctx_release(device_);
}

Current::Current(const Context& context) : context_(context) {
  context.driver().check(context.api().ctx_push(context.handle()), "cuCtxPushCurrent",
                         "device " + std::to_string(context.device()));
}

Current::~Current() {
  ContextHandle* popped = nullptr;
  context_.api().ctx_pop(&popped);
}

Stream make_stream(const std::shared_ptr<const Context>& context) {
  StreamHandle* handle = nullptr;
  context->driver().check(context->api().stream_create(&handle, kNonBlockingStream),
                          "cuStreamCreate", "non-blocking");
  return Stream(context, handle);
}

Event make_event(const std::shared_ptr<const Context>& context, bool between_processes) {
  EventHandle* handle = nullptr;
  const unsigned flags = kEventWithoutTime | (between_processes ? kEventBetweenProcesses : 0);
  context->driver().check(context->api().event_create(&handle, flags), "cuEventCreate",
                          "flags " + std::to_string(flags));
  return Event(context, handle);
}

Event open_event(const std::shared_ptr<const Context>& context, const EventExport& exported) {
  EventHandle* handle = nullptr;
  context->driver().check(context->api().ipc_open_event(&handle, exported), "cuIpcOpenEventHandle",
                          "an event of the peer");
  return Event(context, handle);
}

EventExport export_event(const Event& event) {
  EventExport handle{};
  event.context().driver().check(event.context().api().ipc_get_event(&handle, event.get()),
                                 "cuIpcGetEventHandle", "an event");
  return handle;
}

Memory allocate(const std::shared_ptr<const Context>& context, std::size_t size_bytes) {
  Address address = 0;
  context->driver().check(context->api().mem_alloc(&address, size_bytes), "cuMemAlloc",
                          std::to_string(size_bytes) + " bytes");
  return Memory(context, address);
}

PeerMemory open_memory(const std::shared_ptr<const Context>& context,
                       const MemoryExport& exported) {
  Address address = 0;
  context->driver().check(context->api().ipc_open_mem(&address, exported, kEnablePeerAccess),
                          "cuIpcOpenMemHandle", "memory of the peer");
  return PeerMemory(context, address);
}

MemoryExport export_memory(const Memory& memory) {
  MemoryExport handle{};
  memory.context().driver().check(memory.context().api().ipc_get_mem(&handle, memory.get()),
                                  "cuIpcGetMemHandle", "memory of the channel");
  return handle;
}

void record(const Event& event, StreamHandle* stream) {
  event.context().driver().check(event.context().api().event_record(event.get(), stream),
                                 "cuEventRecord", "an event of the channel");
}

void wait(StreamHandle* stream, const Event& event) {
  event.context().driver().check(event.context().api().stream_wait_event(stream, event.get(), 0),
                                 "cuStreamWaitEvent", "an event of the channel");
}

void copy(const Context& context, Address to, Address from, std::size_t size_bytes,
          StreamHandle* stream) {
  context.driver().check(context.api().copy(to, from, size_bytes, stream), "cuMemcpyDtoDAsync",
                         std::to_string(size_bytes) + " bytes");
}

bool is_done(const Event& event) {
  const Result result = event.context().api().event_query(event.get());
  if (result == kNotReady) {
    return false;
  }
  event.context().driver().check(result, "cuEventQuery", "an event of the channel");
  return true;
}

bool await(const Event& event, StreamHandle* stream, const std::function<bool()>& given_up) {
  for (int look = 0; look < kLooksAtOnce; ++look) {
    if (is_done(event)) {
      return true;
    }
  }
  wait(stream, event);
  const std::shared_ptr<Place> place = mark(event.context(), stream);
  std::unique_lock<std::mutex> lock(place->mutex);
  while (!place->changed.wait_for(lock, kLookUp, [&] { return place->reached; })) {
    lock.unlock();
    // After an error, the driver does not call the function that sets `reached`. In this case,
    // is_done() throws the error.
    if (is_done(event)) {
      return true;
    }
    if (given_up()) {
      return false;
    }
    lock.lock();
  }
  lock.unlock();
  static_cast<void>(is_done(event));  // throws errors of the device
  return true;
}

}  // namespace adaptive::cuda
