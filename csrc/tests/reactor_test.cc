// Tests of the reactor.
#include "common/reactor.h"

#include <signal.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <thread>

#include "common/error.h"
#include "common/scoped_fd.h"
#include "tests/check.h"

namespace {

using adaptive::Reactor;
using adaptive::ScopedFd;
using adaptive::testing::check;
using adaptive::testing::check_throws;
using adaptive::testing::Child;
using adaptive::testing::eventually;
using std::chrono::milliseconds;

struct Pair {
  Pair() {
    int raw[2];
    check(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, raw) == 0, "a pair");
    near.reset(raw[0]);
    far.reset(raw[1]);
  }
  void put(char byte) const { check(::write(far.get(), &byte, 1) == 1, "room"); }
  int take() const {
    char byte = 0;
    return ::read(near.get(), &byte, 1) == 1 ? byte : -1;
  }
  ScopedFd near;
  ScopedFd far;
};

void no_error(const std::exception& error) {
  std::printf("  unexpected: %s\n", error.what());
  ++adaptive::testing::failures();
}

TEST(a_handler_runs_on_the_reactor_s_thread) {
  Reactor reactor;
  const Pair pair;
  std::atomic<int> sum{0};
  std::atomic<std::thread::id> ran_on{};
  reactor.add(
      pair.near.get(), EPOLLIN,
      [&](std::uint32_t) {
        ran_on = std::this_thread::get_id();
        sum += pair.take();
      },
      no_error);
  for (char byte = 1; byte <= 100; ++byte) {
    pair.put(byte);
  }
  eventually([&] { return sum == 5050; }, "all bytes");
  check(ran_on.load() != std::this_thread::get_id(), "another thread");
  check_throws<adaptive::Error>([&] { reactor.add(pair.near.get(), EPOLLIN, {}, {}); }, "already");
  reactor.remove(pair.near.get());
  reactor.remove(pair.near.get());
}

TEST(nothing_runs_after_remove) {
  Reactor reactor;
  const Pair pair;
  for (int round = 0; round < 200; ++round) {
    auto alive = std::make_unique<std::atomic<int>>(0);
    reactor.add(pair.near.get(), EPOLLIN | EPOLLOUT, [&](std::uint32_t) { ++*alive; }, no_error);
    if (round % 2 == 0) {
      eventually([&] { return *alive > 0; }, "a run");
    }
    reactor.remove(pair.near.get());
    alive.reset();  // if the handler ran later, it would use freed memory
  }
}

TEST(a_descriptor_s_number_may_be_used_again) {
  Reactor reactor;
  std::atomic<int> wrong{0};
  for (int round = 0; round < 300; ++round) {
    const Pair first;
    const Pair second;
    std::atomic<bool> done{false};
    // Both descriptors are ready in the same round. The first handler removes the other one and
    // closes its descriptor.
    reactor.add(
        first.near.get(), EPOLLOUT,
        [&](std::uint32_t) {
          reactor.remove(second.near.get());
          reactor.remove(first.near.get());
          done = true;
        },
        no_error);
    reactor.add(second.near.get(), EPOLLIN, [&](std::uint32_t) { ++wrong; }, no_error);
    eventually([&] { return done.load(); }, "a run");
    reactor.remove(second.near.get());
  }
  check(wrong == 0, "no run of a handler whose descriptor was never ready");
}

TEST(a_failing_handler_is_removed_and_its_error_told) {
  Reactor reactor;
  const Pair pair;
  std::atomic<int> runs{0};
  std::atomic<int> told{0};
  const auto add = [&] {
    reactor.add(
        pair.near.get(), EPOLLOUT,
        [&](std::uint32_t) {
          ++runs;
          throw adaptive::Error("broken");
        },
        [&](const std::exception& error) {
          told += std::string(error.what()) == "broken" ? 1 : 0;
        });
  };
  add();
  eventually([&] { return told == 1; }, "the error");
  ::usleep(5000);
  check(runs == 1, "one run");
  reactor.modify(pair.near.get(), EPOLLOUT);  // no effect on a descriptor that was removed
  add();
  eventually([&] { return told == 2; }, "the second error");
  reactor.remove(pair.near.get());
}

TEST(modify_changes_what_is_watched) {
  Reactor reactor;
  const Pair pair;
  std::atomic<int> writable{0};
  reactor.add(
      pair.near.get(), EPOLLIN,
      [&](std::uint32_t) {
        ++writable;
        reactor.modify(pair.near.get(), EPOLLIN);
      },
      no_error);
  ::usleep(5000);
  check(writable == 0, "no run yet");
  reactor.modify(pair.near.get(), EPOLLIN | EPOLLOUT);
  eventually([&] { return writable == 1; }, "a run");
  ::usleep(5000);
  check(writable == 1, "one run");
  reactor.remove(pair.near.get());
}

TEST(tasks_run_in_order_and_may_post) {
  Reactor reactor;
  std::vector<int> order;
  std::atomic<bool> done{false};
  for (int i = 0; i < 1000; ++i) {
    reactor.post([&order, i] { order.push_back(i); });
  }
  reactor.post([&] { reactor.post([&] { done = true; }); });
  eventually([&] { return done.load(); }, "the last task");
  for (int i = 0; i < 1000; ++i) {
    check(order[static_cast<std::size_t>(i)] == i, "the order of posting");
  }
}

TEST(a_failing_task_is_told_to_the_next_caller) {
  Reactor reactor;
  std::atomic<bool> done{false};
  reactor.post([] { throw adaptive::Error("task"); });
  reactor.post([&] { done = true; });
  eventually([&] { return done.load(); }, "the next task");
  check_throws<adaptive::Error>([&] { reactor.every(milliseconds(1), [] {}); }, "task");
  reactor.every(milliseconds(1), [] {});
}

TEST(timers_repeat_until_stopped) {
  Reactor reactor;
  std::atomic<int> fast{0};
  std::atomic<int> once{0};
  auto alive = std::make_unique<std::atomic<int>>(0);
  const auto timer = reactor.every(milliseconds(1), [&] { ++*alive; });
  reactor.every(milliseconds(2), [&] { ++fast; });
  std::atomic<std::uint64_t> own{0};
  own = reactor.every(milliseconds(5), [&] {
    ++once;
    reactor.stop(own);
  });
  eventually([&] { return fast > 20 && *alive > 20; }, "many runs");
  check(once == 1, "one run of the timer that stops itself");
  reactor.stop(timer);
  alive.reset();
  const int seen = fast;
  eventually([&] { return fast > seen; }, "the other timer to go on");
  reactor.stop(timer);
}

TEST(signals_are_not_for_the_reactor) {
  static std::atomic<pthread_t> handled_by{};
  struct sigaction action{};
  action.sa_handler = [](int) { handled_by = ::pthread_self(); };
  struct sigaction before{};
  ::sigaction(SIGUSR1, &action, &before);
  {
    const Reactor reactor;
    for (int i = 0; i < 50; ++i) {
      handled_by = pthread_t{};
      ::kill(::getpid(), SIGUSR1);
      eventually([] { return handled_by.load() != pthread_t{}; }, "the signal");
      check(handled_by == ::pthread_self(), "the signal in this thread");
    }
  }
  ::sigaction(SIGUSR1, &before, nullptr);
}

TEST(a_forked_child_leaves_the_parent_s_reactor_alone) {
  auto reactor = std::make_unique<Reactor>();
  const Pair pair;
  std::atomic<int> seen{0};
  reactor->add(pair.near.get(), EPOLLIN, [&](std::uint32_t) { seen += pair.take(); }, no_error);
  Child child([&] {
    check_throws<adaptive::Error>([&] { reactor->every(milliseconds(1), [] {}); }, "forked");
    reactor->remove(pair.near.get());
    reactor->post([] {});
    reactor.reset();
  });
  child.join();
  pair.put(1);
  eventually([&] { return seen == 1; }, "the parent's handler");
  reactor->remove(pair.near.get());
}

TEST(the_last_owner_may_be_a_handler) {
  auto reactor = std::make_shared<Reactor>();
  std::atomic<bool> done{false};
  std::weak_ptr<Reactor> weak = reactor;
  // The task is the reactor's last owner and is destroyed on the reactor's own thread.
  reactor->post([reactor, &done]() mutable {
    ::usleep(2000);
    done = true;
  });
  reactor.reset();
  eventually([&] { return done.load() && weak.expired(); }, "the end");
  ::usleep(20000);  // the thread closes its descriptors
}

}  // namespace
