// Tests of links and listeners.
#include "common/link.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <memory>

#include "common/error.h"
#include "common/hello.h"
#include "common/socket_address.h"
#include "common/socket_io.h"
#include "tests/check.h"
#include "tests/links.h"

namespace adaptive::testing {
namespace {

TEST_OF_LINKS(records_travel) {
  Ends ends = link_up(kind);
  check(ends.near.peer() == 0 && ends.far.peer() == 1, "the ranks");
  check(ends.near.is_unix() == (kind == Kind::kUnix), "the kind");
  check(ends.near.peer_pid() == (kind == Kind::kUnix ? ::getpid() : 0), "the pid");
  check((::fcntl(ends.near.fd(), F_GETFD) & FD_CLOEXEC) != 0, "close on exec");
  check((::fcntl(ends.far.fd(), F_GETFD) & FD_CLOEXEC) != 0, "close on exec");
  for (const std::size_t size : {0UL, 1UL, 4096UL, 3000000UL}) {
    Bytes bytes(size);
    for (std::size_t i = 0; i < size; ++i) {
      bytes[i] = static_cast<std::uint8_t>(i * 7);
    }
    Joined sender([&] { ends.far.send_record(bytes, {}, patient(), kNoTick); });
    const Link::Record record = ends.near.recv_record(size, 0, patient(), kNoTick);
    sender.join();
    check(record.bytes == bytes && record.fds.empty(), "the same bytes");
  }
}

int memory_with(char byte) {
  const int fd = ::memfd_create("test", MFD_CLOEXEC);
  check(fd >= 0 && ::write(fd, &byte, 1) == 1, "memory");
  return fd;
}

TEST(descriptors_travel) {
  Ends ends = link_up(Kind::kUnix);
  const ScopedFd first(memory_with('a'));
  const ScopedFd second(memory_with('b'));
  ends.far.send_record({1, 2, 3}, {first.get(), second.get()}, patient(), kNoTick);
  ends.far.send_record({4}, {second.get()}, patient(), kNoTick);
  const Link::Record record = ends.near.recv_record(3, 2, patient(), kNoTick);
  check(record.bytes == Bytes({1, 2, 3}) && record.fds.size() == 2, "the record");
  char byte = 0;
  check(::pread(record.fds[1].get(), &byte, 1, 0) == 1 && byte == 'b', "the second memory");
  check((::fcntl(record.fds[0].get(), F_GETFD) & FD_CLOEXEC) != 0, "close on exec");
  check(ends.near.recv_record(1, 1, patient(), kNoTick).bytes == Bytes({4}), "the next record");
  check_throws<std::invalid_argument>(
      [&] { ends.far.send_record({}, std::vector<int>(17, first.get()), patient(), kNoTick); },
      "17 descriptors");
}

TEST(a_wrong_number_of_descriptors_is_refused) {
  const ScopedFd memory(memory_with('a'));
  const auto refused = [&](const std::vector<int>& sent, std::size_t due, const char* words) {
    Ends ends = link_up(Kind::kUnix);
    ends.far.send_record({1}, sent, patient(), kNoTick);
    check_throws<Error>([&] { ends.near.recv_record(1, due, patient(), kNoTick); }, words);
  };
  refused({}, 1, "0 descriptors came where 1 were expected");
  refused({memory.get()}, 0, "1 descriptors came where 0 were expected");
  refused({memory.get(), memory.get()}, 1, "2 descriptors came where 1 were expected");
  // A header with wrong numbers of bytes and descriptors.
  Ends ends = link_up(Kind::kUnix);
  const adaptive::RecordHeader header = adaptive::encode_record_header(0, 1);
  adaptive::send_all(ends.far.fd(), header.data(), header.size(), {memory.get(), memory.get()},
                     patient(), kNoTick, "test");
  check_throws<Error>([&] { ends.near.recv_record(0, 1, patient(), kNoTick); },
                      "has 2 descriptors instead of 1");
  check_throws<std::invalid_argument>(
      [&] { link_up(Kind::kTcp4).near.send_record({}, {memory.get()}, patient(), kNoTick); },
      "only unix links");
}

TEST_OF_LINKS(broken_records_are_refused) {
  const auto refused = [&](const std::function<void(Ends&)>& speak, const char* words) {
    Ends ends = link_up(kind);
    speak(ends);
    check_throws<Error>([&] { ends.near.recv_record(100, 0, soon(), kNoTick); }, words);
  };
  const auto say = [](Ends& ends, const std::string& text) {
    adaptive::send_all(ends.far.fd(), text.data(), text.size(), {}, patient(), kNoTick, "");
  };
  const adaptive::RecordHeader header = adaptive::encode_record_header(10, 0);
  const std::string announced(header.begin(), header.end());
  refused([&](Ends& ends) { ends.far.send_record(Bytes(101), {}, patient(), kNoTick); },
          "101 bytes is above the limit of 100");
  refused([&](Ends& ends) { say(ends, announced + "abc"); }, "rank 0");
  refused(
      [&](Ends& ends) {
        say(ends, announced);
        ends.far = Link();
      },
      "closed");
  refused([&](Ends& ends) { say(ends, "GET / HTTP/1.0\r\n"); }, "did not send a record");
  Ends ends = link_up(kind);
  ends.near = Link();
  check_throws<Error>(
      [&] {
        for (;;) {
          ends.far.send_record(Bytes(1 << 20), {}, patient(), kNoTick);
        }
      },
      "sendmsg");
}

TEST_OF_LINKS(waits_have_deadlines) {
  Listener listener = listen(kind, rank(1));
  check_throws<DeadlineError>([&] { listener.accept(0, "test", soon(), kNoTick); }, "rank 0");
  const ScopedFd silent = stranger(listener.address());
  check_throws<DeadlineError>([&] { listener.accept(0, "test", soon(), kNoTick); },
                              listener.address());
  // The listener's queue takes the connection, but no process answers.
  check_throws<DeadlineError>([&] { connect(listener.address(), rank(0), 1, soon()); },
                              "did not answer");
  const std::string gone = listen(kind, rank(1)).address();
  check_throws<DeadlineError>([&] { connect(gone, rank(0), 1, soon()); }, "could not be reached");
  int ticks = 0;
  try {
    listener.accept(0, "test", soon(350), [&] { ++ticks; });
  } catch (const DeadlineError&) {
  }
  check(ticks >= 2 && ticks <= 4, "a tick about every 100 ms, not " + std::to_string(ticks));
  check_throws<std::runtime_error>(
      [&] { listener.accept(0, "test", patient(), [] { throw std::runtime_error("ctrl-c"); }); },
      "ctrl-c");
  check_throws<std::runtime_error>(
      [&] {
        connect_unix("@nobody-is-here", rank(0), 1, patient(),
                     [] { throw std::runtime_error("ctrl-c"); });
      },
      "ctrl-c");
  Ends ends = link_up(kind);
  check_throws<DeadlineError>([&] { ends.near.recv_record(1, 0, soon(), kNoTick); }, "rank 0");
  check_throws<DeadlineError>([&] { ends.near.send_record(Bytes(64 << 20), {}, soon(), kNoTick); },
                              "did not accept a record");
}

TEST(connecting_waits_for_the_listener) {
  ScopedFd taken(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  SocketAddress any = SocketAddress::on_tcp("127.0.0.1", 0);
  check(::bind(taken.get(), any.get(), any.length()) == 0, "a port");
  const int port = host_and_port(SocketAddress::local_of(taken.get()).text()).second;
  std::atomic<bool> connected{false};
  Link far;  // a connection that is closed before it is accepted is ignored
  Joined thread([&] {
    far = connect_tcp("127.0.0.1", port, rank(0), 1, patient(), kNoTick);
    connected = true;
  });
  ::usleep(30000);
  check(!connected, "nobody there yet");
  taken.reset();
  {
    Listener listener = Listener::on_tcp("127.0.0.1", port, rank(1));
    listener.accept(0, "test", patient(), kNoTick);
    thread.join();
  }
}

TEST_OF_LINKS(strangers_are_refused_and_block_nobody) {
  Listener listener = listen(kind, rank(1));
  const std::string address = listener.address();
  std::vector<ScopedFd> strangers;
  for (int i = 0; i < 20; ++i) {
    strangers.push_back(stranger(address));  // sends nothing
    strangers.push_back(stranger(address));
    // sends invalid bytes
    write_to(strangers.back(), Bytes(static_cast<std::size_t>(i) + 1, 0x55));
    strangers.push_back(stranger(address));
    Bytes half = hello_bytes(rank(0), 1);
    half.resize(static_cast<std::size_t>(i) + 1);
    write_to(strangers.back(), half);
    strangers.push_back(stranger(address));
    write_to(strangers.back(), Bytes(500, 0x55));
    stranger(address);  // closed immediately
  }
  std::string refusal;
  Link far;
  Joined wrong_token([&] {
    try {
      connect(address, rank(0, 8), 1);
    } catch (const Error& error) {
      refusal = error.what();
    }
    try {
      connect(address, rank(0), 2);
    } catch (const Error& error) {
      refusal += error.what();
    }
    far = connect(address, rank(0), 1);
  });
  Link link = listener.accept(0, "test", patient(), kNoTick);
  wrong_token.join();
  check(link.peer() == 0, "the right peer");
  check_contains(refusal, "belongs to another job");
  check_contains(refusal, "it is another rank");
  check(listener.num_refused() >= 20, "strangers counted");
}

TEST(many_silent_strangers_do_not_use_up_descriptors) {
  Listener listener = listen(Kind::kTcp4, rank(1));
  std::vector<ScopedFd> strangers;
  for (int i = 0; i < 300; ++i) {
    strangers.push_back(stranger(listener.address()));
    if (i % 50 == 0) {
      check_throws<DeadlineError>([&] { listener.accept(0, "test", soon(1), kNoTick); }, "rank 0");
    }
  }
  const int before = adaptive::testing::num_open_descriptors();
  check_throws<DeadlineError>([&] { listener.accept(0, "test", soon(1), kNoTick); }, "rank 0");
  check(adaptive::testing::num_open_descriptors() <= before + 64, "a bounded number of them");
}

TEST(the_listening_process_is_checked_too) {
  const auto answered_by = [](const Bytes& answer, const char* words) {
    ScopedFd fake(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    SocketAddress any = SocketAddress::on_tcp("127.0.0.1", 0);
    check(::bind(fake.get(), any.get(), any.length()) == 0 && ::listen(fake.get(), 1) == 0, "port");
    const std::string address = SocketAddress::local_of(fake.get()).text();
    Joined thread([&] {
      const ScopedFd guest(::accept4(fake.get(), nullptr, nullptr, SOCK_CLOEXEC));
      write_to(guest, answer);
      char byte = 0;
      while (::recv(guest.get(), &byte, 1, 0) > 0) {
      }
    });
    check_throws<Error>([&] { connect(address, rank(0), 1); }, words);
  };
  answered_by(Bytes(adaptive::kHelloBytes, 0x41), "does not run this package");
  answered_by(hello_bytes(rank(1, 8), 0), "belongs to another job");
  answered_by(hello_bytes(rank(2), 0), "is not rank 1");
  answered_by(hello_bytes(rank(1), 3), "is not rank 1");
}

TEST_OF_LINKS(early_peers_are_kept) {
  Listener listener = listen(kind, rank(1));
  std::vector<std::unique_ptr<Child>> children;
  for (const int number : {5, 4, 3, 2}) {
    children.push_back(std::make_unique<Child>([&, number] {
      Identity self = rank(number);
      for (const char* purpose : {"b", "a"}) {
        self.purpose = purpose;
        Link link = connect(listener.address(), self, 1);
        const std::string word = purpose + std::to_string(number);
        link.send_record(Bytes(word.begin(), word.end()), {}, patient(), kNoTick);
      }
    }));
  }
  for (const int number : {2, 3, 4, 5}) {
    for (const char* purpose : {"a", "b"}) {
      Link link = listener.accept(number, purpose, patient(), kNoTick);
      const std::string word = purpose + std::to_string(number);
      check(link.recv_record(10, 0, patient(), kNoTick).bytes == Bytes(word.begin(), word.end()),
            "the record of " + word);
      if (kind == Kind::kUnix) {
        check(link.peer_pid() == children[static_cast<std::size_t>(5 - number)]->pid(), "its pid");
      }
    }
  }
  for (const auto& child : children) {
    child->join();
  }
}

TEST(a_peer_that_came_back_replaces_its_earlier_self) {
  Listener listener = listen(Kind::kTcp4, rank(1));
  const auto knock = [&] {
    ScopedFd socket = stranger(listener.address());
    write_to(socket, hello_bytes(rank(0), 1));
    return socket;
  };
  {
    const ScopedFd gone = knock();
  }
  check_throws<DeadlineError>([&] { listener.accept(0, "test", soon(), kNoTick); }, "rank 0");
  const ScopedFd first = knock();
  check_throws<DeadlineError>([&] { listener.accept(9, "test", soon(), kNoTick); }, "rank 9");
  const ScopedFd second = knock();
  check_throws<DeadlineError>([&] { listener.accept(9, "test", soon(), kNoTick); }, "rank 9");
  const Link link = listener.accept(0, "test", patient(), kNoTick);
  check(link.remote() == SocketAddress::local_of(second.get()).text(), "the later one");
}

TEST(bad_addresses_are_refused) {
  check_throws<std::invalid_argument>(
      [] { connect_tcp("localhost", 1, rank(0), 1, soon(), kNoTick); }, "numeric");
  check_throws<std::invalid_argument>(
      [] { connect_tcp("127.0.0.1", 70000, rank(0), 1, soon(), kNoTick); }, "within 0 and 65535");
  check_throws<std::invalid_argument>(
      [] { connect_unix("/tmp/file", rank(0), 1, soon(), kNoTick); }, "must be '@'");
  check_throws<std::invalid_argument>([] { Listener::on_tcp("", 0, rank(1)); }, "numeric");
  check_throws<adaptive::SystemError>([] { Listener::on_tcp("192.0.2.1", 0, rank(1)); }, "bind");
  Identity wordy = rank(0);
  wordy.purpose = "sixteen letters!";
  Listener listener = listen(Kind::kUnix, rank(1));
  check_throws<std::invalid_argument>([&] { connect(listener.address(), wordy, 1); }, "15");
  check(Listener::on_unix(rank(1)).address() != Listener::on_unix(rank(1)).address(), "random");
}

}  // namespace
}  // namespace adaptive::testing
