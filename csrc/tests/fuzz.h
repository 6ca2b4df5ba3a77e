// How a fuzzer here is written: one file per parser, with the two functions below. Built in one of
// two ways:
//
//   clang++ -std=c++17 -g -O1 -I csrc -pthread -fsanitize=fuzzer,address,undefined <fuzzer> <parts>
//   c++     -std=c++17 -g -O1 -I csrc -pthread -fsanitize=address,undefined <fuzzer>
//           csrc/tests/fuzz_main.cc <parts>
//
// The first searches by itself. The second needs no clang: it plays back the files that are given,
// or without any the seeds and a fixed number of random changes of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace adaptive::testing {

using FuzzInput = std::vector<std::uint8_t>;

// Inputs that the parser accepts, to start from.
std::vector<FuzzInput> fuzz_seeds();

// What must hold for every input; ends the process otherwise, which a fuzzer notices.
inline void must(bool holds, const char* what) {
  if (!holds) {
    std::fprintf(stderr, "must hold: %s\n", what);
    std::abort();
  }
}

template <typename Value>
void append(FuzzInput& input, const Value& value) {
  static_assert(std::is_trivially_copyable_v<Value>);
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(&value);
  input.insert(input.end(), bytes, bytes + sizeof(value));
}

// The bytes of an input, one value after the other; zeros behind its end.
class FuzzReader {
 public:
  FuzzReader(const std::uint8_t* data, std::size_t size) : data_(data), left_(size) {}

  template <typename Value>
  Value take() {
    Value value{};
    static_assert(std::is_trivially_copyable_v<Value>);
    const std::size_t count = left_ < sizeof(value) ? left_ : sizeof(value);
    if (count != 0) {
      std::memcpy(static_cast<void*>(&value), data_, count);
      data_ += count;
      left_ -= count;
    }
    return value;
  }

  const std::uint8_t* data() const { return data_; }
  std::size_t left() const { return left_; }

 private:
  const std::uint8_t* data_;
  std::size_t left_;
};

}  // namespace adaptive::testing
