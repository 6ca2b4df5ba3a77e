// Fuzzer of the frames of a TCP channel. Parts: csrc/tcp/frame.cc csrc/common/message.cc
//
// Two decoders get the same bytes, the first all at once and the second in portions of sizes that
// the input determines. Both must have the same result.
#include <algorithm>
#include <memory>
#include <string>

#include "common/error.h"
#include "tcp/frame.h"
#include "tests/fuzz.h"

namespace {

using adaptive::Message;
using adaptive::tcp::Frame;
using adaptive::tcp::FrameDecoder;
using adaptive::tcp::FrameType;
using adaptive::testing::append;
using adaptive::testing::FuzzInput;
using adaptive::testing::FuzzReader;
using adaptive::testing::must;

constexpr std::uint64_t kJob = 3;
constexpr std::uint64_t kLimitBytes = 100'000;

// Records all calls.
class Log final : public adaptive::tcp::FrameSink {
 public:
  std::byte* begin(const Message& message) override {
    must(message.nbytes <= kLimitBytes, "a payload within the limit");
    must(!memory_, "one message at a time");
    text += "begin " + std::to_string(message.nbytes) + "\n";
    memory_ = std::make_unique<std::byte[]>(static_cast<std::size_t>(message.nbytes));
    return memory_.get();
  }
  void complete(const Message& message) override {
    must(memory_ != nullptr, "a message that began");
    text +=
        "complete " + std::to_string(message.sequence) + " " +
        std::to_string(adaptive::crc32c(memory_.get(), static_cast<std::size_t>(message.nbytes))) +
        "\n";
    memory_.reset();
  }
  void credits(std::uint32_t count) override { text += "credits " + std::to_string(count) + "\n"; }
  void goodbye() override { text += "goodbye\n"; }

  std::string text;

 private:
  std::unique_ptr<std::byte[]> memory_;
};

// Passes all bytes to a decoder, `portion(room)` at a time, like recvmsg().
template <typename Portion>
std::string decode(const std::uint8_t* data, std::size_t size, const Portion& portion) {
  FrameDecoder decoder(kJob, kLimitBytes, 0);
  Log log;
  try {
    while (size != 0) {
      const FrameDecoder::Room room = decoder.room();
      must(room.size_bytes != 0, "room for more");
      const std::size_t count = std::min({size, room.size_bytes, portion(room.size_bytes)});
      std::size_t left = count;
      for (int i = 0; i < room.count && left != 0; ++i) {
        const iovec& part = room.parts[static_cast<std::size_t>(i)];
        const std::size_t here = std::min(left, part.iov_len);
        std::memcpy(part.iov_base, data, here);
        data += here;
        left -= here;
      }
      size -= count;
      decoder.took(count, log);
    }
  } catch (const adaptive::Error& error) {
    log.text += error.what();
  }
  return log.text;
}

void append_frame(FuzzInput& input, FrameType type, std::uint32_t credits,
                  std::uint32_t piece_bytes) {
  std::byte header[adaptive::tcp::kFrameBytes];
  adaptive::tcp::encode_frame({type, credits, piece_bytes}, header);
  append(input, header);
}

void append_start(FuzzInput& input, std::uint64_t sequence, std::size_t nbytes,
                  std::size_t piece_bytes) {
  append_frame(input, FrameType::kStart, 0, static_cast<std::uint32_t>(piece_bytes));
  Message message;
  message.job = kJob;
  message.sequence = sequence;
  message.nbytes = message.piece_bytes = nbytes;
  message.dimensions = 1;
  message.shape[0] = static_cast<std::int64_t>(nbytes);
  append(input, message);
  input.resize(input.size() + piece_bytes, 0x5a);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  FuzzReader reader(data, size);
  std::uint64_t state = reader.take<std::uint8_t>();
  const std::string whole =
      decode(reader.data(), reader.left(), [](std::size_t room_bytes) { return room_bytes; });
  const std::string portions = decode(reader.data(), reader.left(), [&](std::size_t room_bytes) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    return (state >> 33U) % std::min<std::size_t>(room_bytes, 300) + 1;
  });
  must(whole == portions, "the same meaning however the bytes come");
  return 0;
}

std::vector<FuzzInput> adaptive::testing::fuzz_seeds() {
  FuzzInput small(1, 7);
  append_frame(small, FrameType::kControl, 3, 0);
  append_start(small, 0, 10, 10);
  append_start(small, 1, 0, 0);
  append_frame(small, FrameType::kControl, 0, 0);
  append_start(small, 2, 500, 500);
  append_frame(small, FrameType::kGoodbye, 1, 0);
  FuzzInput pieces(1, 9);
  append_start(pieces, 0, 40'000, 30'000);
  append_frame(pieces, FrameType::kMore, 2, 9'000);
  pieces.resize(pieces.size() + 9'000, 1);
  append_frame(pieces, FrameType::kControl, 1, 0);
  append_frame(pieces, FrameType::kMore, 0, 1'000);
  pieces.resize(pieces.size() + 1'000, 2);
  append_start(pieces, 1, 1, 1);
  return {small, pieces};
}
