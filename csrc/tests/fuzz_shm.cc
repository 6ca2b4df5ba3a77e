// Fuzzer of the code that reads the peer's memory in a shared-memory channel. It also covers
// check_message() and the assembler of pieces, which all channels use. Parts: csrc/shm/incoming.cc
// csrc/common/{assembler,completions,copy,message}.cc
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <variant>

#include "common/completions.h"
#include "common/error.h"
#include "shm/incoming.h"
#include "tests/fuzz.h"

namespace {

using adaptive::Arrival;
using adaptive::ChannelState;
using adaptive::Completions;
using adaptive::Failure;
using adaptive::Item;
using adaptive::MappedRegion;
using adaptive::Message;
using adaptive::MessageKind;
using adaptive::ScopedFd;
using adaptive::shm::Control;
using adaptive::shm::Entry;
using adaptive::shm::Incoming;
using adaptive::shm::Offer;
using adaptive::testing::append;
using adaptive::testing::FuzzInput;
using adaptive::testing::FuzzReader;
using adaptive::testing::must;

constexpr std::uint64_t kJob = 3;
constexpr std::uint64_t kLimitBytes = 10'000;
constexpr std::size_t kSlotBytes = 1024;

// One entry of an input. `number` is the entry's number, unless `off_by` changes it.
struct Wire {
  Message message;
  std::uint32_t slot;
  std::uint32_t flags;
  std::uint64_t off_by;
};

Offer layout() {
  Offer layout;
  layout.slots = 4;
  layout.slot_bytes = kSlotBytes;
  layout.slot_stride = 4096;
  layout.num_entries = adaptive::shm::entries_for(layout.slots);
  layout.data_bytes = layout.slots * layout.slot_stride;
  layout.control_bytes = adaptive::shm::control_bytes(layout.num_entries);
  return layout;
}

// Two mappings: the fuzzer writes to the first, and the channel reads from the second.
struct Memory {
  explicit Memory(std::size_t size_bytes) : fd(::memfd_create("fuzz", MFD_CLOEXEC)) {
    must(fd && ::ftruncate(fd.get(), static_cast<off_t>(size_bytes)) == 0, "memory");
    mine = MappedRegion::shared(fd.get(), size_bytes);
    theirs = MappedRegion::shared(fd.get(), size_bytes);
  }
  ScopedFd fd;
  MappedRegion mine;
  MappedRegion theirs;
};

// Checks the properties that receivers of the message rely on.
void check_accepted(const Message& message) {
  must(message.dimensions <= adaptive::kMaxDimensions, "few enough dimensions");
  const std::size_t element_bytes = adaptive::element_bytes(message.dtype);
  must(element_bytes >= 1 && element_bytes <= 16, "a known element type");
  unsigned __int128 nbytes = element_bytes;
  bool empty = false;
  for (int i = 0; i < message.dimensions; ++i) {
    must(message.shape[i] >= 0, "sizes that can be");
    empty = empty || message.shape[i] == 0;
    // Each size is at most 2^64. The product is limited, so that seven sizes cannot overflow it.
    nbytes = std::min<unsigned __int128>(nbytes, ~std::uint64_t{0}) *
             static_cast<std::uint64_t>(message.shape[i]);
  }
  must(message.nbytes == (empty ? 0 : nbytes), "a shape of so many bytes");
}

// Takes the items that were found. Returns false after a failure.
bool take_all(Completions& completions) {
  while (std::optional<Item> item = completions.poll()) {
    if (std::holds_alternative<Failure>(*item)) {
      return false;
    }
    const auto& arrival = std::get<Arrival>(*item);
    must(arrival.payload.size_bytes() == arrival.message.nbytes, "all of the payload");
    must(arrival.message.nbytes <= std::max<std::uint64_t>(kLimitBytes, kSlotBytes),
         "a payload within the limit");
    check_accepted(arrival.message);
    // All slots and assembled messages must be readable and writable to the last byte. A sanitizer
    // or the kernel reports errors.
    std::byte* const data = arrival.payload.data();
    must(std::all_of(data, data + arrival.payload.size_bytes(),
                     [](std::byte byte) { return byte == std::byte{1}; }),
         "every byte filled");
    std::fill_n(data, arrival.payload.size_bytes(), std::byte{1});
  }
  return true;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  FuzzReader reader(data, size);
  Memory control(layout().control_bytes);
  Memory slots(layout().data_bytes);
  std::fill_n(slots.mine.data(), slots.mine.size_bytes(), std::byte{1});
  const auto completions = std::make_shared<Completions>(1);
  adaptive::Session session;
  session.completions = completions;
  session.job = kJob;
  const auto channel_state = std::make_shared<ChannelState>(session, 0);
  const auto incoming = std::make_shared<Incoming>(
      channel_state, kLimitBytes, layout(), std::move(control.theirs), std::move(slots.theirs),
      ScopedFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), (size & 1) != 0);
  completions->add(incoming);
  auto* const entries = reinterpret_cast<Entry*>(control.mine.data() + sizeof(Control));
  for (std::uint64_t number = 0; reader.left() != 0; ++number) {
    const auto wire = reader.take<Wire>();
    must(!describe(wire.message).empty(), "a description of anything");
    Entry& entry = entries[number % layout().num_entries];
    const auto* bytes = reinterpret_cast<const unsigned char*>(&wire.message);
    std::copy_n(bytes, sizeof(entry.front), entry.front);
    std::copy_n(bytes + sizeof(entry.front), sizeof(entry.back), entry.back);
    entry.slot = wire.slot;
    entry.flags = wire.flags;
    entry.number.store(number + 1 + wire.off_by);
    if (!take_all(*completions)) {
      break;
    }
  }
  incoming->lose("the input ended");
  take_all(*completions);
  completions->remove(incoming.get());
  return 0;
}

std::vector<FuzzInput> adaptive::testing::fuzz_seeds() {
  const auto wire_of = [](std::uint64_t sequence, std::uint64_t nbytes, std::uint64_t offset,
                          std::uint64_t piece_bytes, std::uint32_t slot) {
    Wire wire{};
    wire.message.job = kJob;
    wire.message.sequence = sequence;
    wire.message.nbytes = nbytes;
    wire.message.offset = offset;
    wire.message.piece_bytes = piece_bytes;
    wire.message.dimensions = 1;
    wire.message.shape[0] = static_cast<std::int64_t>(nbytes);
    wire.slot = slot;
    return wire;
  };
  FuzzInput small;
  for (std::uint32_t i = 0; i < 12; ++i) {
    append(small, wire_of(i, 100 * i % kSlotBytes, 0, 100 * i % kSlotBytes, i % 4));
  }
  FuzzInput pieces;
  for (std::uint32_t i = 0; i < 3; ++i) {
    append(pieces, wire_of(0, 3 * kSlotBytes, i * kSlotBytes, kSlotBytes, i));
  }
  Wire end = wire_of(1, 0, 0, 0, shm::kNoSlot);
  end.message.kind = MessageKind::kEnd;
  append(pieces, end);
  FuzzInput wide;
  Wire matrix = wire_of(0, 8 * 2 * 3 * 4, 0, 8 * 2 * 3 * 4, 0);
  matrix.message.dtype = ElementType::kFloat64;
  matrix.message.dimensions = kMaxDimensions;
  const std::int64_t shape[kMaxDimensions] = {1, 2, 1, 3, 1, 4, 1};
  std::copy(shape, shape + kMaxDimensions, matrix.message.shape);
  append(wide, matrix);
  return {small, pieces, wide};
}
