// Shared memory channels whose peers are killed or fork, and memory that is not there. Build: see
// tests/test_extension.py.
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <random>

#include "common/error.h"
#include "shm/channel.h"
#include "shm/limits.h"
#include "tests/pair.h"

namespace adaptive::testing {
namespace {

ShmOptions options_of(unsigned slots = 4, std::size_t slot_bytes = 4096) {
  ShmOptions options;
  options.slots = slots;
  options.slot_bytes = slot_bytes;
  return options;
}

Open opening(const ShmOptions& options) {
  return [options](const Session& session, Link link) {
    return open_shm(session, std::move(link), options, patient(), {});
  };
}

// ---- Processes that end

// Runs the two ends in children of their own, which share nothing but the listener's name.
// Returns when the channels are open.
struct Processes {
  Processes(const std::function<void(End&)>& low_body, const std::function<void(End&)>& high_body,
            const ShmOptions& options = options_of()) {
    int ends[2];
    int opened[2];
    check(::pipe(ends) == 0 && ::pipe(opened) == 0, "pipe");
    high = std::make_unique<Child>([&] {
      Listener listener = Listener::on_unix(identity_of(1));
      const std::string address = listener.address();
      check(::write(ends[1], address.data(), address.size()) > 0, "write");
      End end = open_end(1, &listener, "", opening(options));
      check(::write(opened[1], "1", 1) == 1, "write");
      high_body(end);
    });
    char address[200] = {};
    check(::read(ends[0], address, sizeof(address)) > 0, "read");
    low = std::make_unique<Child>([&] {
      End end = open_end(0, nullptr, address, opening(options));
      check(::write(opened[1], "0", 1) == 1, "write");
      low_body(end);
    });
    char byte = 0;
    for (int i = 0; i < 2; ++i) {
      check(::read(opened[0], &byte, 1) == 1, "both ends open");
    }
    for (const int fd : {ends[0], ends[1], opened[0], opened[1]}) {
      ::close(fd);
    }
  }

  std::unique_ptr<Child> low;
  std::unique_ptr<Child> high;
};

// Sends and takes until the peer is lost, which has to be said within 5 s of silence.
void exchange_until_lost(End& end) {
  int number = 0;
  try {
    for (;; ++number) {
      send_pattern(*end.sender, static_cast<std::size_t>(number) * 37 % 9000, number);
      auto item = end.session.completions->wait(soon(5000));
      check(item.has_value(), "an item within 5 s");
      if (const auto* failure = std::get_if<Failure>(&*item)) {
        check(failure->kind == Failure::Kind::kPeerLost, "a lost peer, not " + failure->text);
        check_contains(failure->text, "is gone");
        return;
      }
    }
  } catch (const PeerLostError&) {
    for (;;) {
      auto item = end.session.completions->wait(soon(5000));
      check(item.has_value(), "a failure within 5 s");
      if (std::holds_alternative<Failure>(*item)) {
        return;
      }
    }
  }
}

int num_memory_files() {
  std::ifstream maps("/proc/self/maps");
  std::string line;
  int count = 0;
  while (std::getline(maps, line)) {
    count += line.find("megatron-adaptive") != std::string::npos ? 1 : 0;
  }
  return count;
}

void kills_at_random_moments(int count) {
  std::mt19937 random(99);
  for (int i = 0; i < count; ++i) {
    Processes both(exchange_until_lost, exchange_until_lost, options_of(3, 4096));
    ::usleep(random() % 20'000);
    Child& victim = i % 2 == 0 ? *both.low : *both.high;
    Child& survivor = i % 2 == 0 ? *both.high : *both.low;
    victim.kill();
    survivor.join();
  }
  check(num_memory_files() == 0, "no memory left");
}

void a_killed_receiver_is_noticed_by_who_waits_in_flush() {
  Processes both(
      [](End& end) {
        for (int number = 0; number < 100; ++number) {
          send_pattern(*end.sender, 3000, number);
        }
        check_throws<PeerLostError>([&] { end.sender->flush(patient()); }, "is gone");
        check(end.sender->pending() == 0, "what waited was let go of");
        check(take_failure(end).kind == Failure::Kind::kPeerLost, "a failure as well");
      },
      [](End&) { ::pause(); });
  ::usleep(100'000);
  both.high->kill();
  both.low->join();
}

// A data loader that a rank forked holds its sockets and memory; the rank's end is noticed all the
// same.
void a_child_of_the_killed_process_does_not_hide_its_end() {
  int ready[2];
  check(::pipe(ready) == 0, "pipe");
  Processes both(
      [&](End&) {
        const pid_t loader = ::fork();
        if (loader == 0) {
          ::pause();
          ::_exit(0);
        }
        check(::write(ready[1], &loader, sizeof(loader)) > 0, "write");
        ::pause();
      },
      [](End& end) { check(take_failure(end).kind == Failure::Kind::kPeerLost, "a lost peer"); });
  pid_t loader = 0;
  check(::read(ready[0], &loader, sizeof(loader)) > 0, "read");
  both.low->kill();
  both.high->join();
  ::kill(loader, SIGKILL);
  ::close(ready[0]);
  ::close(ready[1]);
}

void a_forked_child_disturbs_nobody() {
  Processes both(
      [](End& end) {
        send_pattern(*end.sender, 1000, 0);
        Arrival held = take_arrival(end);
        auto reserved = end.sender->reserve(100);
        {
          Child child([&] {
            check_arrival(held, 1000, 7);  // it may read
            held = Arrival();
            reserved.reset();
            check_throws<Error>([&] { send_pattern(*end.sender, 10, 1); }, "not to its child");
            check_throws<Error>([&] { end.sender->flush(soon()); }, "not to its child");
            end.sender->close();
            end.sender.reset();
          });
          child.join();
        }
        check(reserved.has_value(), "still reserved");
        send_pattern(*end.sender, 1000, 1);
        check_arrival(held, 1000, 7);
        end.sender->close();
        check(end.sender->flush(patient()), "flushed");
        take(end);  // the peer's last word
      },
      [](End& end) {
        send_pattern(*end.sender, 1000, 7);
        check_arrival(take_arrival(end), 1000, 0);
        check_arrival(take_arrival(end), 1000, 1);
        check(!end.session.completions->wait(soon(50)).has_value(), "no failure");
        send_pattern(*end.sender, 1, 8);
        end.sender->close();
        check(end.sender->flush(patient()), "flushed");
      });
  both.low->join();
  both.high->join();
}

// ---- Memory

void write_file(const std::string& path, const std::string& text) {
  std::ofstream file(path);
  file << text;
}

void memory_limits_are_read() {
  char folder[] = "/tmp/shm_test_XXXXXX";
  check(::mkdtemp(folder) != nullptr, "mkdtemp");
  const std::string root = folder;
  const SystemPaths paths{root + "/proc", root + "/cg"};
  check(std::system(
            ("mkdir -p " + root + "/proc/self " + root + "/cg/a/b " + root + "/cg/memory/docker")
                .c_str()) == 0,
        "mkdir");
  write_file(root + "/proc/meminfo", "MemTotal: 900 kB\nMemAvailable:   1048576 kB\n");
  check(memory_room(paths).bytes == std::uint64_t{1} << 30, "MemAvailable");
  write_file(root + "/proc/self/cgroup", "5:cpu,memory:/docker/x\n0::/a/b\n");
  write_file(root + "/cg/a/memory.max", "500000000\n");
  write_file(root + "/cg/a/memory.current", "300000000\n");
  write_file(root + "/cg/a/memory.stat", "anon 5\ninactive_file 100000000\n");
  write_file(root + "/cg/a/b/memory.max", "max\n");
  write_file(root + "/cg/a/b/memory.current", "1\n");
  check(memory_room(paths).bytes == 300'000'000, "the second version");
  write_file(root + "/cg/memory/memory.limit_in_bytes", "150000000\n");
  write_file(root + "/cg/memory/memory.usage_in_bytes", "50000000\n");
  check(memory_room(paths).bytes == 100'000'000, "the first version");
  check_throws<Error>([&] { check_memory(80'000'000, "a test", paths); },
                      "a test needs 76.29 MiB of shared memory, but 95.37 MiB are left within the "
                      "memory limit of the container");
  check_memory(20'000'000, "a test", paths);
  check(std::system(("rm -r " + root).c_str()) == 0, "rm");
}

void more_memory_than_there_is_is_an_error_on_both_ends() {
  const ShmOptions options = options_of(64, std::size_t{1} << 40);
  check_throws<Error>([&] { open_pair(opening(options), opening(options)); },
                      "64 slots of 1 TiB) needs 64 TiB of shared memory");
}

}  // namespace
}  // namespace adaptive::testing

int main(int argc, char** argv) {
  using namespace adaptive::testing;
  const std::string only = argc > 1 ? argv[1] : "";
  const int kills = argc > 2 ? std::atoi(argv[2]) : 20;
  const auto test = [&only](const char* name, const std::function<void()>& body) {
    run(name, body, only);
  };
  test("kills", [kills] { kills_at_random_moments(kills); });
  test("killed receiver", a_killed_receiver_is_noticed_by_who_waits_in_flush);
  test("killed with child", a_child_of_the_killed_process_does_not_hide_its_end);
  test("fork", a_forked_child_disturbs_nobody);
  test("limits", memory_limits_are_read);
  test("too much", more_memory_than_there_is_is_an_error_on_both_ends);
  return summary();
}
