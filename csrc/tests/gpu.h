// A GPU in tests of channels: the stand-in driver, a stream that computes, and messages that are
// created and read on this stream.
#pragma once

#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda/owners.h"
#include "shm/channel.h"
#include "tests/pair.h"

namespace adaptive::testing {

// Path of the stand-in driver; see tests/cpp_tests.py.
inline std::string driver_library() {
  const char* const path = std::getenv("STANDIN_CUDA_LIBRARY");
  check(path != nullptr, "STANDIN_CUDA_LIBRARY in the environment");
  return path;
}

inline ShmOptions on_gpu(unsigned slots = 4, std::size_t slot_bytes = 8192) {
  ShmOptions options;
  options.slots = slots;
  options.slot_bytes = slot_bytes;
  options.cuda_device = 0;
  options.cuda_driver = driver_library();
  return options;
}

inline std::string text_of(const Sender& sender, const std::string& name) {
  return std::get<std::string>(sender.info().at(name));
}

class Gpu {
 public:
  // Data to send: host bytes, and the device memory to which the stream copies them. The destructor
  // waits for this copy, so that the memory is not reused too early.
  struct Payload {
    Payload() = default;
    Payload(const Payload&) = delete;
    Payload& operator=(const Payload&) = delete;
    ~Payload() {
      for (const Deadline deadline = patient(); !cuda::is_done(made) && !deadline.expired();) {
        ::usleep(100);
      }
    }

    Bytes bytes;
    cuda::Memory memory;
    cuda::Event made;
  };

  explicit Gpu(int ordinal = 0)
      : context_(
            std::make_shared<const cuda::Context>(cuda::Driver::load(driver_library()), ordinal)),
        stream_(in([this] { return cuda::make_stream(context_); })) {}

  void* stream() const { return stream_.get(); }

  // Sends a pattern that the stream has not computed yet.
  void send(Sender& sender, std::size_t size, int number) {
    auto payload = std::make_shared<Payload>();
    payload->bytes = pattern(size, static_cast<unsigned>(number));
    in([&] {
      payload->memory = cuda::allocate(context_, size);
      check_call(context_->api().copy_to_device(payload->memory.get(), payload->bytes.data(), size,
                                                stream_.get()));
      payload->made = cuda::make_event(context_, false);
      cuda::record(payload->made, stream_.get());
      return 0;
    });
    const auto data = static_cast<std::uintptr_t>(payload->memory.get());
    std::shared_ptr<void> owner = std::move(payload);
    sender.send_after(message_of(size, number), reinterpret_cast<const void*>(data), true, stream(),
                      keeping_any(&owner));
  }

  // Sends a pattern in host memory, in order with the other messages.
  void send_from_host(Sender& sender, std::size_t size, int number) {
    auto bytes = std::make_shared<Bytes>(pattern(size, static_cast<unsigned>(number)));
    const void* const data = bytes->data();
    std::shared_ptr<void> owner = std::move(bytes);
    sender.send_after(message_of(size, number), data, false, stream(), keeping_any(&owner));
  }

  // Starts reading an arrival on the stream and returns its slot immediately. check_all() checks
  // the bytes.
  void read(Arrival arrival, std::size_t size, int number) {
    check(arrival.message.microbatch == number && arrival.message.nbytes == size,
          "message " + std::to_string(number) + ", not " + describe(arrival.message));
    if (arrival.device == nullptr) {
      check_arrival(arrival, size, number);
      return;
    }
    arrival.device->enter(arrival.slot, stream());
    auto found = std::make_unique<Bytes>(size);
    in([&] {
      check_call(context_->api().copy_to_host(
          found->data(), reinterpret_cast<std::uintptr_t>(arrival.payload.data()), size,
          stream_.get()));
      return 0;
    });
    read_.emplace_back(number, std::move(found));
  }

  void check_all() {
    finish();
    for (const auto& [number, found] : read_) {
      check(*found == pattern(found->size(), static_cast<unsigned>(number)),
            "message " + std::to_string(number) + " with its bytes");
    }
    read_.clear();
  }

  // Waits for the stream.
  void finish() {
    in([&] {
      const cuda::Event event = cuda::make_event(context_, false);
      cuda::record(event, stream_.get());
      const Deadline deadline = patient();
      check(cuda::await(event, stream_.get(), [&] { return deadline.expired(); }),
            "a stream that ends");
      return 0;
    });
  }

  std::shared_ptr<const cuda::Context> context() const { return context_; }

  template <typename Action>
  auto in(const Action& action) -> decltype(action()) {
    const cuda::Current current(*context_);
    return action();
  }

 private:
  static Keeper keeping_any(std::shared_ptr<void>* owner) {
    return {[](void* context) { return std::move(*static_cast<std::shared_ptr<void>*>(context)); },
            owner};
  }
  void check_call(cuda::Result result) { context_->driver().check(result, "a call", "a test"); }

  std::shared_ptr<const cuda::Context> context_;
  cuda::Stream stream_;
  std::vector<std::pair<int, std::unique_ptr<Bytes>>> read_;
};

}  // namespace adaptive::testing
