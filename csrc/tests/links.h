// Shared helpers of the tests of links and LinkWatch.
#pragma once

#include <sys/socket.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/hello.h"
#include "common/link.h"
#include "common/scoped_fd.h"
#include "common/socket_address.h"
#include "tests/check.h"

namespace adaptive::testing {

using std::chrono::milliseconds;

using Bytes = std::vector<std::uint8_t>;

constexpr milliseconds kNeverSilent(60'000);

const Tick kNoTick;

inline Identity rank(int number, std::uint8_t job = 7) {
  Identity identity;
  identity.token.fill(job);
  identity.rank = number;
  identity.purpose = "test";
  return identity;
}

// A listener's address, and how to connect to it.
enum class Kind { kUnix, kTcp4, kTcp6 };

inline Listener listen(Kind kind, const Identity& self) {
  switch (kind) {
    case Kind::kUnix:
      return Listener::on_unix(self);
    case Kind::kTcp4:
      return Listener::on_tcp("127.0.0.1", 0, self);
    case Kind::kTcp6:
      return Listener::on_tcp("::1", 0, self);
  }
  throw std::logic_error("kind");
}

inline std::pair<std::string, int> host_and_port(const std::string& address) {
  const std::size_t colon = address.rfind(':');
  return {address.substr(0, colon), std::stoi(address.substr(colon + 1))};
}

inline Link connect(const std::string& address, const Identity& self, int peer,
                    const Deadline& deadline = patient()) {
  if (address.front() == '@') {
    return connect_unix(address, self, peer, deadline, kNoTick);
  }
  const auto [host, port] = host_and_port(address);
  return connect_tcp(host, port, self, peer, deadline, kNoTick);
}

struct Ends {
  Link near;  // rank 1, which accepted
  Link far;   // rank 0, which connected
};

inline Ends link_up(Kind kind) {
  Listener listener = listen(kind, rank(1));
  Ends ends;
  {
    const Joined thread([&] { ends.far = connect(listener.address(), rank(0), 1); });
    ends.near = listener.accept(0, "test", patient(), kNoTick);
  }
  return ends;
}

// Connects to the listener like a foreign process, which may send anything.
inline ScopedFd stranger(const std::string& address) {
  SocketAddress where =
      address.front() == '@'
          ? SocketAddress::on_unix(address)
          : SocketAddress::on_tcp(host_and_port(address).first, host_and_port(address).second);
  ScopedFd socket(::socket(where.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
  check(::connect(socket.get(), where.get(), where.length()) == 0, "a connection");
  return socket;
}

inline void write_to(const ScopedFd& socket, const Bytes& bytes) {
  check(::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
            static_cast<ssize_t>(bytes.size()),
        "room");
}

inline Bytes hello_bytes(const Identity& self, int target) {
  adaptive::Hello hello;
  hello.self = self;
  hello.target = target;
  const adaptive::HelloBytes bytes = adaptive::encode_hello(hello);
  return Bytes(bytes.begin(), bytes.end());
}

inline bool add_test_of_links(const std::string& name, const std::function<void(Kind)>& test) {
  const std::pair<Kind, std::string> kinds[] = {
      {Kind::kUnix, " (unix)"}, {Kind::kTcp4, " (tcp)"}, {Kind::kTcp6, " (tcp, IPv6)"}};
  for (const auto& [kind, suffix] : kinds) {
    add_test(name + suffix, [kind = kind, test] { test(kind); });
  }
  return true;
}

}  // namespace adaptive::testing

// Defines a test of each kind of link: `TEST_OF_LINKS(what_it_shows) { ... kind ... }`.
#define TEST_OF_LINKS(name)                                                                        \
  void name(Kind kind);                                                                            \
  [[maybe_unused]] const bool name##_added = ::adaptive::testing::add_test_of_links(#name, &name); \
  void name(Kind kind)
