// A stand-in CUDA driver, as a library that is opened instead of the real one. Device memory is
// host memory, streams are threads that execute their work after random delays, and handles are
// valid in other processes. It aborts a process that makes an error which a real device would
// reveal only occasionally. Such errors are using memory after it was freed, freeing memory that
// other processes have open, and accesses that no event orders, even if the delays happen to order
// them.
//
// Settings, read from the environment when a process first calls cuInit():
//   STANDIN_CUDA_DEVICES       numbers of the visible GPUs: "0", "0,1"
//   STANDIN_CUDA_PEERS=0       no GPU reaches another GPU
//   STANDIN_CUDA_FAIL          a call that fails: "cuIpcOpenMemHandle"
//   STANDIN_CUDA_CORRUPT=1     copies between devices change a byte
//   STANDIN_CUDA_DELAY_US      longest delay before a stream continues
//   STANDIN_CUDA_SAME_PROCESS=1  a process may open objects that it exported
//   STANDIN_CUDA_ANY_MEMORY=1  host memory counts as device memory
#include "tests/standin_cuda.h"

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <sstream>
#include <thread>
#include <vector>

#include "cuda/driver.h"

namespace standin {

using adaptive::cuda::Address;
using adaptive::cuda::ContextHandle;
using adaptive::cuda::Device;
using adaptive::cuda::EventExport;
using adaptive::cuda::EventHandle;
using adaptive::cuda::HostFunction;
using adaptive::cuda::kNotReady;
using adaptive::cuda::kSuccess;
using adaptive::cuda::MemoryExport;
using adaptive::cuda::Result;
using adaptive::cuda::StreamHandle;
using adaptive::cuda::Uuid;

constexpr Result kInvalidValue = 1, kInvalidDevice = 101, kInvalidContext = 201,
                 kNotSupported = 801;
constexpr int kLongestWaitUs = 30'000'000;

struct Settings {
  std::vector<int> devices;
  bool peers = true, corrupt = false, same_process = false, any_memory = false;
  std::string fail;
  unsigned delay_us = 0;
};

// The state of a process. Never destroyed, because its threads run until the process exits.
struct State {
  std::mutex mutex;
  Settings settings;
  std::vector<int> retained;
  std::map<std::byte*, std::shared_ptr<Allocation>> memory;
  Clock host;
  std::uint64_t num_streams = 0;
};

State& state() {
  static State* const only = new State;
  return *only;
}

std::string setting(const char* name, const char* otherwise = "") {
  const char* const value = std::getenv(name);
  return value == nullptr ? otherwise : value;
}

thread_local std::vector<ContextHandle*> contexts;
std::atomic<unsigned> unanswered{0};

bool fails(const char* call) {
  return state().settings.fail == call;
}

std::shared_ptr<Allocation> find(std::byte* address, std::size_t count) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  auto next = state().memory.upper_bound(address);
  if (next != state().memory.begin()) {
    const auto& found = std::prev(next)->second;
    if (address + count <= found->data() + found->size_bytes()) {
      return found;
    }
  }
  if (!state().settings.any_memory) {
    misuse("an address is used that is of no device");
  }
  return nullptr;
}

std::byte* pointer(Address address) {
  return reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(address));
}

// ---- Streams and events

// An event, which is owned by its handle and by the streams that use it.
struct Event {
  SharedEvent own;  // used unless the event is exported
  File file;
  SharedEvent* shared = &own;
  bool imported = false;
};
using EventPointer = std::shared_ptr<Event>;

class Stream {
 public:
  Stream() {
    {
      const std::lock_guard<std::mutex> lock(state().mutex);
      id_ = (static_cast<std::uint64_t>(::getpid()) << 20) + ++state().num_streams;
    }
    random_.seed(static_cast<unsigned>(id_ ^ (id_ >> 20)));
    thread_ = std::thread([this] { run(); });
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() {
    add([](Stream& self) { self.ended_ = true; });
    thread_.join();
  }

  using Work = std::function<void(Stream&)>;

  void add(Work work) {
    Clock host;
    {
      const std::lock_guard<std::mutex> lock(state().mutex);
      ++state().host.of(static_cast<std::uint64_t>(::getpid()) << 20);
      host = state().host;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    work_.push_back([host, work = std::move(work)](Stream& self) {
      self.clock_.join(host);
      ++self.clock_.of(self.id_);
      self.linger();
      work(self);
    });
    changed_.notify_all();
  }

  void record(SharedEvent& event, std::uint64_t number) {
    const SpinLock guard(event.lock);
    event.clock = clock_;
    event.done.store(number);
  }
  void wait(SharedEvent& event, std::uint64_t number) {
    for (int waited_us = 0; event.done.load() < number; waited_us += 20) {
      ::usleep(20);
      if (waited_us > kLongestWaitUs) {
        misuse("a stream waits for an event that does not come");
      }
    }
    const SpinLock guard(event.lock);
    clock_.join(event.clock);
  }
  // Copies in two steps, so that another access can happen in between.
  void copy(std::byte* to, std::byte* from, std::size_t count, bool to_device, bool from_device) {
    const auto target = to_device ? find(to, count) : nullptr;
    const auto source = from_device ? find(from, count) : nullptr;
    if (source != nullptr) {
      source->use(from, count, false, id_, clock_);
    }
    if (target != nullptr) {
      target->use(to, count, true, id_, clock_);
    }
    std::memcpy(to, from, count / 2);
    linger();
    std::memcpy(to + count / 2, from + count / 2, count - count / 2);
    if (to_device && from_device && count != 0 && state().settings.corrupt) {
      to[count / 2] ^= std::byte{1};
    }
  }

 private:
  void linger() {
    if (const unsigned longest = state().settings.delay_us; longest != 0) {
      ::usleep(random_() % longest);
    }
  }
  void run() {
    while (!ended_) {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return !work_.empty(); });
      const Work work = std::move(work_.front());
      work_.pop_front();
      lock.unlock();
      work(*this);
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> work_;
  std::uint64_t id_ = 0;
  Clock clock_;
  std::minstd_rand random_;
  bool ended_ = false;
  std::thread thread_;
};

Stream& stream_of(StreamHandle* handle) {
  static Stream* const standard = new Stream;
  return handle == nullptr ? *standard : *reinterpret_cast<Stream*>(handle);
}

EventPointer event_of(EventHandle* handle) {
  EventPointer event = *reinterpret_cast<EventPointer*>(handle);
  if (event->shared->alive.load() == 0) {
    misuse("an event is used after it was destroyed");
  }
  return event;
}

EventHandle* handle_of(EventPointer event) {
  return reinterpret_cast<EventHandle*>(new EventPointer(std::move(event)));
}

Result copy(std::byte* to, std::byte* from, std::size_t count, StreamHandle* stream, bool to_device,
            bool from_device) {
  if (contexts.empty()) {
    return kInvalidContext;
  }
  stream_of(stream).add([=](Stream& self) { self.copy(to, from, count, to_device, from_device); });
  return kSuccess;
}

bool may_open(const File::Handle& handle) {
  return handle.magic == kMagic && (handle.process != ::getpid() || state().settings.same_process);
}

template <typename Export>
File::Handle read_handle(const Export& exported) {
  File::Handle handle;
  std::memcpy(&handle, exported.bytes, sizeof(handle));
  return handle;
}

}  // namespace standin

using namespace standin;

// Returns how many times an event was queried before it was done.
extern "C" __attribute__((visibility("default"))) unsigned standin_unanswered() {
  return unanswered.load();
}

#define STANDIN extern "C" __attribute__((visibility("default"))) Result

STANDIN cuInit(unsigned) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  Settings& settings = state().settings;
  if (!settings.devices.empty()) {
    return kSuccess;
  }
  std::istringstream devices(setting("STANDIN_CUDA_DEVICES", "0"));
  for (std::string number; std::getline(devices, number, ',');) {
    settings.devices.push_back(std::stoi(number));
  }
  state().retained.resize(settings.devices.size());
  settings.peers = setting("STANDIN_CUDA_PEERS") != "0";
  settings.corrupt = setting("STANDIN_CUDA_CORRUPT") == "1";
  settings.same_process = setting("STANDIN_CUDA_SAME_PROCESS") == "1";
  settings.any_memory = setting("STANDIN_CUDA_ANY_MEMORY") == "1";
  settings.fail = setting("STANDIN_CUDA_FAIL");
  settings.delay_us = static_cast<unsigned>(std::stoul(setting("STANDIN_CUDA_DELAY_US", "0")));
  return settings.fail == "cuInit" ? kNotSupported : kSuccess;
}
STANDIN cuGetErrorName(Result result, const char** name) {
  *name = result == kNotSupported ? "CUDA_ERROR_NOT_SUPPORTED" : "CUDA_ERROR_OTHER";
  return kSuccess;
}
STANDIN cuGetErrorString(Result result, const char** text) {
  *text = result == kNotSupported ? "operation not supported" : "another error";
  return kSuccess;
}
STANDIN cuDeviceGetCount(int* count) {
  *count = static_cast<int>(state().settings.devices.size());
  return kSuccess;
}
STANDIN cuDeviceGet(Device* device, int ordinal) {
  *device = ordinal;
  return ordinal < 0 || ordinal >= static_cast<int>(state().settings.devices.size())
             ? kInvalidDevice
             : kSuccess;
}
STANDIN cuDeviceGetUuid_v2(Uuid* uuid, Device device) {
  std::memset(uuid->bytes, 1 + state().settings.devices.at(static_cast<std::size_t>(device)), 16);
  return kSuccess;
}
STANDIN cuDeviceCanAccessPeer(int* can, Device device, Device peer) {
  *can = device != peer && state().settings.peers ? 1 : 0;
  return kSuccess;
}
STANDIN cuDevicePrimaryCtxRetain(ContextHandle** context, Device device) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  int& retained = state().retained.at(static_cast<std::size_t>(device));
  ++retained;
  *context = reinterpret_cast<ContextHandle*>(&retained);
  return kSuccess;
}
STANDIN cuDevicePrimaryCtxRelease_v2(Device device) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  if (--state().retained.at(static_cast<std::size_t>(device)) < 0) {
    misuse("a context is released once too often");
  }
  return kSuccess;
}
STANDIN cuCtxPushCurrent_v2(ContextHandle* context) {
  contexts.push_back(context);
  return kSuccess;
}
STANDIN cuCtxPopCurrent_v2(ContextHandle** context) {
  if (contexts.empty()) {
    return kInvalidContext;
  }
  *context = contexts.back();
  contexts.pop_back();
  return kSuccess;
}
STANDIN cuMemAlloc_v2(Address* address, std::size_t size_bytes) {
  if (contexts.empty()) {
    return kInvalidContext;
  }
  if (fails("cuMemAlloc")) {
    return kNotSupported;
  }
  File file(Allocation::file_bytes(size_bytes));
  new (file.data()) SharedMemory;
  auto made = std::make_shared<Allocation>(std::move(file), size_bytes, false);
  *address = reinterpret_cast<std::uintptr_t>(made->data());
  const std::lock_guard<std::mutex> lock(state().mutex);
  state().memory[made->data()] = std::move(made);
  return kSuccess;
}
static Result let_go(Address address, bool imported) {
  std::shared_ptr<Allocation> found;
  {
    const std::lock_guard<std::mutex> lock(state().mutex);
    const auto place = state().memory.find(pointer(address));
    if (place == state().memory.end() || place->second->imported() != imported) {
      misuse("memory is freed or closed that is none");
    }
    found = std::move(place->second);
    state().memory.erase(place);
  }
  imported ? found->close() : found->free();
  return kSuccess;
}
STANDIN cuMemFree_v2(Address address) {
  return contexts.empty() ? kInvalidContext : let_go(address, false);
}
STANDIN cuIpcCloseMemHandle(Address address) {
  return contexts.empty() ? kInvalidContext : let_go(address, true);
}
STANDIN cuIpcGetMemHandle(MemoryExport* handle, Address address) {
  File::Handle file = find(pointer(address), 0)->file().handle();
  std::memset(handle->bytes, 0, sizeof(handle->bytes));
  std::memcpy(handle->bytes, &file, sizeof(file));
  const std::uint64_t size_bytes = find(pointer(address), 0)->size_bytes();
  std::memcpy(handle->bytes + sizeof(file), &size_bytes, sizeof(size_bytes));
  return fails("cuIpcGetMemHandle") ? kNotSupported : kSuccess;
}
STANDIN cuIpcOpenMemHandle_v2(Address* address, MemoryExport exported, unsigned) {
  const File::Handle handle = read_handle(exported);
  std::uint64_t size_bytes = 0;
  std::memcpy(&size_bytes, exported.bytes + sizeof(handle), sizeof(size_bytes));
  File file;
  if (contexts.empty() || !may_open(handle)) {
    return kInvalidContext;
  }
  if (fails("cuIpcOpenMemHandle") || !File::open(handle, file)) {
    return kNotSupported;
  }
  auto opened = std::make_shared<Allocation>(std::move(file), size_bytes, true);
  *address = reinterpret_cast<std::uintptr_t>(opened->data());
  const std::lock_guard<std::mutex> lock(state().mutex);
  state().memory[opened->data()] = std::move(opened);
  return kSuccess;
}
STANDIN cuMemcpyHtoDAsync_v2(Address to, const void* from, std::size_t count,
                             StreamHandle* stream) {
  auto* const source = static_cast<std::byte*>(const_cast<void*>(from));
  return copy(pointer(to), source, count, stream, true, false);
}
STANDIN cuMemcpyDtoHAsync_v2(void* to, Address from, std::size_t count, StreamHandle* stream) {
  return copy(static_cast<std::byte*>(to), pointer(from), count, stream, false, true);
}
STANDIN cuMemcpyDtoDAsync_v2(Address to, Address from, std::size_t count, StreamHandle* stream) {
  return fails("cuMemcpyDtoDAsync") ? kNotSupported
                                    : copy(pointer(to), pointer(from), count, stream, true, true);
}
STANDIN cuStreamCreate(StreamHandle** stream, unsigned) {
  *stream = contexts.empty() ? nullptr : reinterpret_cast<StreamHandle*>(new Stream);
  return *stream == nullptr ? kInvalidContext : kSuccess;
}
STANDIN cuStreamDestroy_v2(StreamHandle* stream) {
  delete reinterpret_cast<Stream*>(stream);
  return kSuccess;
}
STANDIN cuStreamWaitEvent(StreamHandle* stream, EventHandle* handle, unsigned) {
  EventPointer event = event_of(handle);
  if (const std::uint64_t number = event->shared->recorded.load(); number != 0) {
    stream_of(stream).add(
        [event = std::move(event), number](Stream& self) { self.wait(*event->shared, number); });
  }
  return kSuccess;
}
STANDIN cuEventCreate(EventHandle** handle, unsigned flags) {
  if (contexts.empty()) {
    return kInvalidContext;
  }
  auto event = std::make_shared<Event>();
  if ((flags & adaptive::cuda::kEventBetweenProcesses) != 0) {
    event->file = File(kPage);
    event->shared = new (event->file.data()) SharedEvent;
  }
  *handle = handle_of(std::move(event));
  return kSuccess;
}
STANDIN cuEventDestroy_v2(EventHandle* handle) {
  auto* const event = reinterpret_cast<EventPointer*>(handle);
  if (!(*event)->imported) {
    (*event)->shared->alive.store(0);
  }
  delete event;
  return kSuccess;
}
STANDIN cuEventRecord(EventHandle* handle, StreamHandle* stream) {
  EventPointer event = event_of(handle);
  const std::uint64_t number = ++event->shared->recorded;
  stream_of(stream).add(
      [event = std::move(event), number](Stream& self) { self.record(*event->shared, number); });
  return kSuccess;
}
STANDIN cuLaunchHostFunc(StreamHandle* stream, HostFunction* function, void* data) {
  stream_of(stream).add([=](Stream&) { function(data); });
  return contexts.empty() ? kInvalidContext : kSuccess;
}
STANDIN cuEventQuery(EventHandle* handle) {
  const EventPointer kept = event_of(handle);
  SharedEvent& event = *kept->shared;
  if (event.done.load() < event.recorded.load()) {
    ++unanswered;
    return kNotReady;
  }
  const SpinLock guard(event.lock);
  const std::lock_guard<std::mutex> lock(state().mutex);
  state().host.join(event.clock);
  return kSuccess;
}
STANDIN cuIpcGetEventHandle(EventExport* handle, EventHandle* event) {
  const File::Handle file = event_of(event)->file.handle();
  std::memset(handle->bytes, 0, sizeof(handle->bytes));
  std::memcpy(handle->bytes, &file, sizeof(file));
  return file.fd < 0 ? kInvalidValue : kSuccess;
}
STANDIN cuIpcOpenEventHandle(EventHandle** handle, EventExport exported) {
  const File::Handle file = read_handle(exported);
  if (contexts.empty() || !may_open(file)) {
    return kInvalidContext;
  }
  auto event = std::make_shared<Event>();
  if (fails("cuIpcOpenEventHandle") || !File::open(file, event->file)) {
    return kNotSupported;
  }
  event->shared = reinterpret_cast<SharedEvent*>(event->file.data());
  event->imported = true;
  *handle = handle_of(std::move(event));
  return kSuccess;
}
