// Tests of LinkWatch.
#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <mutex>

#include "common/link.h"
#include "common/reactor.h"
#include "tests/check.h"
#include "tests/links.h"

namespace adaptive::testing {
namespace {

// Collects the calls of a LinkWatch.
class Losses {
 public:
  std::function<void(const std::string&)> listener() {
    return [this](const std::string& reason) {
      const std::lock_guard<std::mutex> lock(mutex_);
      reasons_.push_back(reason);
    };
  }
  std::size_t count() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return reasons_.size();
  }
  std::string only() const {
    eventually([this] { return count() > 0; }, "a loss");
    ::usleep(20000);
    const std::lock_guard<std::mutex> lock(mutex_);
    check(reasons_.size() == 1, "one loss");
    return reasons_.front();
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> reasons_;
};

// A peer in another process, connected with this process by a link.
struct Peer {
  Peer(Kind kind, const std::function<void(Link)>& body) : listener(listen(kind, rank(1))) {
    child = std::make_unique<Child>([&] { body(connect(listener.address(), rank(0), 1)); });
    link = listener.accept(0, "test", patient(), kNoTick);
  }
  Listener listener;
  std::unique_ptr<Child> child;
  Link link;
};

void sleep_for_ever(Link) {
  for (;;) {
    ::pause();
  }
}

// The parent exits before its child, as can happen with data loaders. `fork` creates the child,
// either with the fork handlers or without them.
void lose_parent_of_child(Kind kind, const std::function<pid_t()>& fork, const std::string& words) {
  int raw[2];
  check(::pipe2(raw, O_CLOEXEC) == 0, "a pipe");
  ScopedFd read_end(raw[0]);
  ScopedFd write_end(raw[1]);
  Peer peer(kind, [&](Link link) {
    if (fork() == 0) {
      write_end.reset();
      char byte = 0;  // the read below ends with the test
      [[maybe_unused]] const ssize_t got = ::read(read_end.get(), &byte, 1);
      ::_exit(0);
    }
    sleep_for_ever(std::move(link));
  });
  Reactor reactor;
  Losses losses;
  const LinkWatch watch(reactor, std::move(peer.link), kNeverSilent, losses.listener());
  ::usleep(10000);
  peer.child->kill();
  check_contains(losses.only(), words);
}

TEST(a_child_of_a_killed_peer_does_not_hide_its_end) {
  // The child also holds the unix socket, so only the exit of the process reveals the loss.
  const auto clone = [] { return static_cast<pid_t>(::syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0)); };
  lose_parent_of_child(Kind::kUnix, clone, "its process ended");
  lose_parent_of_child(Kind::kTcp4, ::fork, "closed without a goodbye");
}

TEST(a_goodbye_is_told_once) {
  Ends ends = link_up(Kind::kTcp4);
  Reactor reactor;
  Losses losses;
  std::atomic<int> goodbyes{0};
  const LinkWatch watch(reactor, std::move(ends.near), kNeverSilent, losses.listener(),
                        [&] { ++goodbyes; });
  check(::send(ends.far.fd(), "hhghg", 5, 0) == 5, "room");
  ends.far = Link();
  eventually([&] { return goodbyes > 0; }, "a goodbye");
  ::usleep(20000);
  check(goodbyes == 1 && losses.count() == 0, "one goodbye and no loss");
}

TEST_OF_LINKS(a_stopped_peer_is_lost_after_the_limit) {
  Peer peer(kind, [](Link link) {
    Reactor reactor;
    const LinkWatch watch(reactor, std::move(link), milliseconds(400), [](const std::string&) {});
    sleep_for_ever(Link());
  });
  Reactor reactor;
  Losses losses;
  const LinkWatch watch(reactor, std::move(peer.link), milliseconds(400), losses.listener());
  ::usleep(1000000);
  check(losses.count() == 0, "heartbeats to count");
  peer.child->signal(SIGSTOP);
  check_contains(losses.only(), "s (limit 0.4 s");
}

TEST_OF_LINKS(standing_still_oneself_is_no_loss_of_the_peer) {
  Peer peer(kind, [](Link link) {
    Reactor reactor;
    Losses losses;
    const LinkWatch watch(reactor, std::move(link), milliseconds(400), losses.listener());
    ::usleep(2000000);
    check(losses.count() == 0, "no loss");
  });
  Reactor reactor;
  const LinkWatch watch(reactor, std::move(peer.link), milliseconds(400),
                        [](const std::string&) {});
  ::usleep(300000);
  peer.child->signal(SIGSTOP);
  ::usleep(1000000);
  peer.child->signal(SIGCONT);
  peer.child->join();
}

TEST(other_bytes_are_a_loss) {
  Ends ends = link_up(Kind::kTcp4);
  Reactor reactor;
  Losses losses;
  const LinkWatch watch(reactor, std::move(ends.near), kNeverSilent, losses.listener());
  check(::send(ends.far.fd(), "hhx", 3, 0) == 3, "room");
  check_contains(losses.only(), "something other than heartbeats");
}

TEST(a_watch_may_be_ended_by_its_own_news) {
  Ends ends = link_up(Kind::kUnix);
  Reactor reactor;
  std::atomic<bool> done{false};
  std::unique_ptr<LinkWatch> watch;
  std::atomic<bool> ready{false};
  watch = std::make_unique<LinkWatch>(reactor, std::move(ends.near), kNeverSilent,
                                      [&](const std::string&) {
                                        while (!ready) {
                                        }
                                        watch.reset();
                                        done = true;
                                      });
  ready = true;
  ends.far = Link();
  eventually([&] { return done.load(); }, "the end");
}

TEST(a_forked_child_does_not_disturb) {
  Ends ends = link_up(Kind::kUnix);
  auto reactor = std::make_unique<Reactor>();
  Losses losses;
  auto near =
      std::make_unique<LinkWatch>(*reactor, std::move(ends.near), kNeverSilent, losses.listener());
  auto far =
      std::make_unique<LinkWatch>(*reactor, std::move(ends.far), kNeverSilent, losses.listener());
  Child child([&] {
    far->say_goodbye();
    far.reset();
    near.reset();
    reactor.reset();
  });
  child.join();
  ::usleep(20000);
  check(losses.count() == 0, "no loss");
  far.reset();
  // If the child had sent a goodbye, the end would have looked regular.
  check_contains(losses.only(), "closed without a goodbye");
}

}  // namespace
}  // namespace adaptive::testing
