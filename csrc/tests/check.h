// Shared helpers of the tests: checks that print the expected values, tests with forked processes,
// and a line of output per test. tests/cpp_tests.py builds the programs.
#pragma once

#include <dirent.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/deadline.h"

namespace adaptive::testing {

// A deadline much longer than any successful wait. Even more time is needed on an emulated machine
// that runs a sanitizer and other programs.
inline Deadline patient() {
  const char* const wanted = std::getenv("TEST_PATIENCE_S");
  return Deadline::after(std::chrono::seconds(wanted == nullptr ? 60 : std::atoi(wanted)));
}

inline Deadline soon(int milliseconds = 20) {
  return Deadline::after(std::chrono::milliseconds(milliseconds));
}

inline void check(bool holds, const std::string& what) {
  if (!holds) {
    throw std::runtime_error("expected: " + what);
  }
}

inline void check_contains(const std::string& text, const std::string& words) {
  check(text.find(words) != std::string::npos, "a text with '" + words + "', got: " + text);
}

template <typename Exception>
void check_throws(const std::function<void()>& action, const std::string& words) {
  try {
    action();
  } catch (const Exception& error) {
    check_contains(error.what(), words);
    return;
  }
  throw std::runtime_error("expected an exception with '" + words + "'");
}

// Waits until another thread or process has made `holds` true.
inline void eventually(const std::function<bool()>& holds, const std::string& what) {
  for (const Deadline deadline = patient(); !holds();) {
    check(!deadline.expired(), what + ", at last");
    ::usleep(1000);
  }
}

// A child process that runs `body`. It is killed by the destructor if the parent did not wait for
// it. It runs no destructors of the parent's objects.
class Child {
 public:
  explicit Child(const std::function<void()>& body) {
    std::fflush(stdout);
    pid_ = ::fork();
    if (pid_ != 0) {
      return;
    }
    int status = 0;
    try {
      body();
    } catch (const std::exception& error) {
      std::printf("  child: %s\n", error.what());
      status = 1;
    }
    std::fflush(stdout);
    ::_exit(status);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() {
    if (pid_ > 0) {
      signal(SIGKILL);
      wait();
    }
  }

  pid_t pid() const { return pid_; }
  void signal(int number) const { ::kill(pid_, number); }

  int wait() {
    int status = 0;
    ::waitpid(pid_, &status, 0);
    pid_ = -1;
    return status;
  }

  void join() {
    const int status = wait();
    check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a child that succeeds");
  }

  void kill() {
    signal(SIGKILL);
    wait();
  }

 private:
  pid_t pid_ = -1;
};

// A thread that is always joined, even if a check fails.
class Joined {
 public:
  explicit Joined(std::function<void()> body) : thread_(std::move(body)) {}
  Joined(const Joined&) = delete;
  Joined& operator=(const Joined&) = delete;
  ~Joined() { join(); }
  void join() {
    if (thread_.joinable()) {
      thread_.join();
    }
  }

 private:
  std::thread thread_;
};

inline int num_open_descriptors() {
  int count = 0;
  DIR* folder = ::opendir("/proc/self/fd");
  while (::readdir(folder) != nullptr) {
    ++count;
  }
  ::closedir(folder);
  return count;
}

inline int& failures() {
  static int count = 0;
  return count;
}

// Runs one test, if its name contains `only`. The test also fails if it leaves descriptors open.
inline void run(const std::string& name, const std::function<void()>& test,
                const std::string& only = "") {
  if (name.find(only) == std::string::npos) {
    return;
  }
  const int before = num_open_descriptors();
  try {
    test();
    const int left = num_open_descriptors() - before;
    check(left == 0, "no descriptors left open, not " + std::to_string(left));
    std::printf("ok   %s\n", name.c_str());
  } catch (const std::exception& error) {
    std::printf("FAIL %s: %s\n", name.c_str(), error.what());
    ++failures();
  }
  std::fflush(stdout);
}

inline int summary() {
  std::printf("%d failed\n", failures());
  return failures() == 0 ? 0 : 1;
}

// All tests with their names, in the order of their definition.
inline std::vector<std::pair<std::string, std::function<void()>>>& all_tests() {
  static std::vector<std::pair<std::string, std::function<void()>>> tests;
  return tests;
}

inline bool add_test(const std::string& name, const std::function<void()>& test) {
  all_tests().emplace_back(name, test);
  return true;
}

}  // namespace adaptive::testing

// Defines a test: `TEST(what_it_shows) { ... }`. test_main.cc runs them all.
#define TEST(name)                                                                        \
  void name();                                                                            \
  [[maybe_unused]] const bool name##_added = ::adaptive::testing::add_test(#name, &name); \
  void name()
