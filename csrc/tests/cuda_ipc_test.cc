// Tests of shared memory channels between GPUs with the stand-in driver. Each end is a separate
// process, and streams continue after random delays.
#include <dirent.h>
#include <dlfcn.h>
#include <unistd.h>

#include <deque>
#include <map>
#include <random>

#include "common/error.h"
#include "tests/gpu.h"

namespace adaptive::testing {
namespace {

using Settings = std::map<std::string, std::string>;
using Body = std::function<void(End&)>;

// One end, which runs in a separate process with its own settings of the stand-in driver.
struct Side {
  Body body;
  ShmOptions options = on_gpu();
  Settings settings = {};
};

Open opening(const ShmOptions& options) {
  return [options](const Session& session, Link link) {
    return open_shm(session, std::move(link), options, patient(), {});
  };
}

// Configures the stand-in driver before the channel is opened, and checks for leftover objects
// after the body.
Open opening_with(const Side& side) {
  return [side](const Session& session, Link link) {
    ::setenv("STANDIN_CUDA_DELAY_US", "300", 0);
    for (const auto& [name, value] : side.settings) {
      ::setenv(name.c_str(), value.c_str(), 1);
    }
    return opening(side.options)(session, std::move(link));
  };
}

Body body_of(const Side& side) {
  return [body = side.body](End& end) {
    body(end);
    if (end.sender != nullptr) {
      end.sender->close();
      end.sender->flush(patient());
    }
  };
}

struct Sides : Processes {
  Sides(const Side& low_side, const Side& high_side)
      : Processes(body_of(low_side), opening_with(low_side), body_of(high_side),
                  opening_with(high_side)) {}
};

void check_direct(const End& end) {
  check(
      text_of(*end.sender, "gpu_path") == "cuda-ipc" && text_of(*end.sender, "gpu_reason").empty(),
      "from memory to memory, not pinned: " + text_of(*end.sender, "gpu_reason"));
}

std::size_t size_of(int number) {
  return 1 + static_cast<std::size_t>(number) * 977 % 8192;
}

// Both ends send and receive continuously. Every third message is held for a while.
void talk(End& end, int count) {
  check_direct(end);
  Gpu gpu;
  std::deque<std::pair<Arrival, int>> held;
  const auto read_first = [&] {
    gpu.read(std::move(held.front().first), size_of(held.front().second), held.front().second);
    held.pop_front();
  };
  for (int number = 0; number < count; ++number) {
    gpu.send(*end.sender, size_of(number), number);
    Arrival arrival = take_arrival(end);
    if (number % 3 == 0) {
      held.emplace_back(std::move(arrival), number);
    } else {
      gpu.read(std::move(arrival), size_of(number), number);
    }
    if (held.size() == 2) {
      read_first();
    }
  }
  while (!held.empty()) {
    read_first();
  }
  gpu.check_all();
  check(end.sender->flush(patient()), "flushed");
}

TEST(both_directions_between_processes) {
  const Body body = [](End& end) { talk(end, 200); };
  Sides({body}, {body}).join();
}

TEST(between_two_devices) {
  const Body body = [](End& end) { talk(end, 40); };
  Sides({body, on_gpu(), {{"STANDIN_CUDA_DEVICES", "0,1"}}},
        {body, on_gpu(), {{"STANDIN_CUDA_DEVICES", "1"}}})
      .join();
}

// Neither a peer that takes no messages nor the sender's own device blocks the sender.
TEST(sending_never_waits) {
  constexpr int kCount = 30;
  Side low{[](End& end) {
    Gpu gpu;
    for (int number = 0; number < kCount; ++number) {
      gpu.send(*end.sender, 8192, number);
    }
    check(!end.sender->flush(soon()), "not flushed");
    eventually([&] { return end.sender->pending() == kCount - 4; }, "all but four pending");
    take_arrival(end);  // no work was done until now
    check(end.sender->flush(patient()), "flushed");
  }};
  Side high{[](End& end) {
    Gpu gpu;
    ::usleep(200'000);
    gpu.send(*end.sender, 1, 0);
    for (int number = 0; number < kCount; ++number) {
      gpu.read(take_arrival(end), 8192, number);
    }
    gpu.check_all();
  }};
  Sides(low, high).join();
}

// Messages that are larger than a slot or come from the host stay in order with other messages.
TEST(the_order_is_kept_whatever_the_way) {
  constexpr int kCount = 60;
  const auto size = [](int number) {
    return number % 4 == 0 ? std::size_t{30'000} : size_of(number);
  };
  Side low{[size](End& end) {
    Gpu gpu;
    for (int number = 0; number < kCount; ++number) {
      if (number % 4 == 0 || number % 7 == 0) {
        gpu.send_from_host(*end.sender, size(number), number);
      } else {
        gpu.send(*end.sender, size(number), number);
      }
    }
    check_throws<Error>([&] { gpu.send(*end.sender, 8193, 0); }, "more than a slot, 8192");
    end.sender->close();
    check_throws<Error>([&] { gpu.send(*end.sender, 10, 0); }, "closed");
    check(end.sender->flush(patient()), "flushed");
  }};
  Side high{[size](End& end) {
    Gpu gpu;
    for (int number = 0; number < kCount; ++number) {
      Arrival arrival = take_arrival(end);
      check((arrival.device == nullptr) == (number % 4 == 0 || number % 7 == 0), "its way");
      gpu.read(std::move(arrival), size(number), number);
    }
    gpu.check_all();
  }};
  Sides(low, high).join();
}

TEST(what_nobody_looked_at_goes_back) {
  Side low{[](End& end) {
    Gpu gpu;
    for (int number = 0; number < 20; ++number) {
      gpu.send(*end.sender, 100, number);
    }
    check(end.sender->flush(patient()), "flushed");
  }};
  Side high{[](End& end) {
    for (int number = 0; number < 20; ++number) {
      take_arrival(end);
    }
  }};
  Sides(low, high).join();
}

// Both ends report the same reason, and messages go through the host.
void check_pinned(const std::string& reason, const Side& low, const Side& high) {
  const auto body = [&](End& end) {
    if (end.sender->info().count("gpu_path") != 0) {
      check(text_of(*end.sender, "gpu_path") == "pinned", "no way between the devices");
      check_contains(text_of(*end.sender, "gpu_reason"), reason);
      check_throws<Error>([&] { end.sender->send_after(message_of(1, 0), "", false, nullptr, {}); },
                          "does not connect GPUs");
    }
    send_pattern(*end.sender, 20'000, 3);
    check_arrival(take_arrival(end), 20'000, 3);
    check(end.sender->flush(patient()), "flushed");
  };
  Sides({body, low.options, low.settings}, {body, high.options, high.settings}).join();
}

TEST(anything_else_is_pinned) {
  const Side usual;
  ShmOptions odd = on_gpu();
  odd.cuda_driver = "libcuda-that-is-not-there.so";
  check_pinned("rank 1: the CUDA driver cannot be opened", usual, {{}, odd});
  odd = on_gpu();
  odd.cuda_refusal = "it is not wanted";
  check_pinned("rank 0: it is not wanted", {{}, odd}, usual);
  odd = on_gpu();
  odd.cuda_device = -1;
  check_pinned("rank 1: its payloads are in host memory", usual, {{}, odd});
  odd = on_gpu();
  odd.cuda_device = 7;
  check_pinned("rank 1: cuDeviceGet(7) failed: another error", usual, {{}, odd});
  odd = on_gpu();
  odd.crc = true;
  check_pinned("checksums", {{}, odd}, {{}, odd});
  odd = on_gpu();
  odd.slots = 5;
  check_pinned("slots", usual, {{}, odd});
  check_pinned("cannot reach the memory of device 1",
               {{}, on_gpu(), {{"STANDIN_CUDA_DEVICES", "0,1"}, {"STANDIN_CUDA_PEERS", "0"}}},
               {{}, on_gpu(), {{"STANDIN_CUDA_DEVICES", "1"}}});
}

TEST(any_call_of_the_trial_may_fail) {
  const Side usual;
  for (const char* const call : {"cuInit", "cuMemAlloc", "cuIpcGetMemHandle", "cuIpcOpenMemHandle",
                                 "cuIpcOpenEventHandle", "cuMemcpyDtoDAsync"}) {
    check_pinned(std::string("rank 1: ") + call, usual,
                 {{}, on_gpu(), {{"STANDIN_CUDA_FAIL", call}}});
  }
  check_pinned("that the peer wrote to slot 0 came out wrong", usual,
               {{}, on_gpu(), {{"STANDIN_CUDA_CORRUPT", "1"}}});
}

// Sends and receives until the peer is lost. Then the device finishes its work.
void exchange_until_lost(End& end) {
  Gpu gpu;
  try {
    for (int number = 0;; ++number) {
      gpu.send(*end.sender, size_of(number), number);
      Item item = take(end);
      if (const auto* failure = std::get_if<Failure>(&item)) {
        check(failure->kind == Failure::Kind::kPeerLost, "a lost peer, not: " + failure->text);
        break;
      }
      gpu.read(std::get<Arrival>(std::move(item)), size_of(number), number);
    }
  } catch (const PeerLostError&) {
  }
  gpu.check_all();
  eventually([&] { return end.sender->pending() == 0; }, "what waited let go of");
  end.sender.reset();
}

TEST(a_killed_peer_holds_no_stream_up) {
  std::minstd_rand random(4);
  for (int i = 0; i < 10; ++i) {
    Side side{exchange_until_lost, on_gpu(3)};
    Sides both(side, side);
    ::usleep(random() % 30'000);
    (i % 2 == 0 ? both.low : both.high)->kill();
    (i % 2 == 0 ? both.high : both.low)->join();
  }
}

// ---- Tests that the stand-in driver detects misuse

void check_misuse(const std::string& what, const std::function<void(Gpu&)>& body) {
  Child child([&] {
    Gpu gpu;
    body(gpu);
    gpu.finish();
  });
  const int status = child.wait();
  check(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT, "an abort: " + what);
}

TEST(misuse_is_found) {
  check_misuse("a read that does not wait", [](Gpu& gpu) {
    gpu.in([&] {
      const cuda::Stream other = cuda::make_stream(gpu.context());
      const cuda::Memory from = cuda::allocate(gpu.context(), 100);
      const cuda::Memory to = cuda::allocate(gpu.context(), 100);
      const Bytes bytes(100);
      gpu.context()->api().copy_to_device(from.get(), bytes.data(), 100, other.get());
      ::usleep(50'000);  // the result is correct by now
      cuda::copy(*gpu.context(), to.get(), from.get(), 100,
                 static_cast<cuda::StreamHandle*>(gpu.stream()));
      gpu.finish();
      return 0;
    });
  });
  check_misuse("memory that is used after it was freed", [](Gpu& gpu) {
    gpu.in([&] {
      Bytes bytes(100);
      cuda::Memory memory = cuda::allocate(gpu.context(), 100);
      const cuda::Address address = memory.get();
      memory.reset();
      gpu.context()->api().copy_to_host(bytes.data(), address, 100,
                                        static_cast<cuda::StreamHandle*>(gpu.stream()));
      gpu.finish();
      return 0;
    });
  });
  check_misuse("a context that is not current", [](Gpu& gpu) {
    check_throws<Error>([&] { cuda::make_stream(gpu.context()); }, "cuStreamCreate");
    std::abort();
  });
}

TEST(errors_say_what_failed) {
  Child([] {
    ::setenv("STANDIN_CUDA_FAIL", "cuMemAlloc", 1);
    Gpu gpu;
    check_throws<Error>(
        [&] { gpu.in([&] { return cuda::allocate(gpu.context(), 77); }); },
        "cuMemAlloc(77 bytes) failed: operation not supported (CUDA_ERROR_NOT_SUPPORTED, 801)");
    check_throws<Error>([] { cuda::Driver::load("libm.so.6"); }, "libm.so.6 has no cuInit");
  }).join();
}

// ---- Waits

void linger(void*) {
  ::usleep(500'000);
}

// A waiting process must not query the driver again and again, which costs processor time.
TEST(a_wait_sleeps_until_the_driver_calls) {
  Child([] {
    Gpu gpu;
    void* const library = ::dlopen(driver_library().c_str(), RTLD_NOW | RTLD_NOLOAD);
    auto* const unanswered =
        reinterpret_cast<unsigned (*)()>(::dlsym(library, "standin_unanswered"));
    gpu.in([&] {
      const cuda::Stream waiting = cuda::make_stream(gpu.context());
      const cuda::Event event = cuda::make_event(gpu.context(), false);
      auto* const computing = static_cast<cuda::StreamHandle*>(gpu.stream());
      gpu.context()->api().launch_host(computing, &linger, nullptr);
      cuda::record(event, computing);
      check(cuda::await(event, waiting.get(), [] { return false; }), "the end of the work");
      check(cuda::is_done(event) && unanswered() < 200, "few questions for it");
      return 0;
    });
  }).join();
}

TEST(a_wait_can_be_given_up) {
  Child([] {
    Gpu gpu;
    gpu.in([&] {
      const cuda::Stream waiting = cuda::make_stream(gpu.context());
      const cuda::Event event = cuda::make_event(gpu.context(), false);
      auto* const computing = static_cast<cuda::StreamHandle*>(gpu.stream());
      gpu.context()->api().launch_host(computing, &linger, nullptr);
      cuda::record(event, computing);
      check(!cuda::await(event, waiting.get(), [] { return true; }), "no longer waited for");
      check(!cuda::is_done(event), "though it is not done");
      gpu.finish();  // the driver calls back after the waiting thread has given up
      return 0;
    });
  }).join();
}

// ---- Both ends in one process, for the thread sanitizer

TEST(both_ends_in_one_process) {
  Child([] {
    ::setenv("STANDIN_CUDA_SAME_PROCESS", "1", 1);
    ::setenv("STANDIN_CUDA_DELAY_US", "200", 1);
    auto ends = open_pair(opening(on_gpu()), opening(on_gpu()));
    {
      Joined other([&] { talk(ends.first, 150); });
      talk(ends.second, 150);
    }
    ends.first.sender->close();
    ends.second.sender->close();
  }).join();
}

}  // namespace
}  // namespace adaptive::testing
