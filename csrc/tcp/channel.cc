#include "tcp/channel.h"

#include <stdexcept>
#include <string>
#include <utility>

#include "common/error.h"
#include "tcp/connection.h"
#include "tcp/frame.h"

namespace adaptive {
namespace {

constexpr unsigned kMostSlots = 64;
constexpr std::chrono::milliseconds kShortestLimit(10);
constexpr std::chrono::milliseconds kLongestLimit = std::chrono::hours(24);

class TcpSender final : public Sender {
 public:
  TcpSender(const Session& session, int peer, std::string remote, const TcpOptions& options,
            std::uint64_t peer_limit_bytes, std::shared_ptr<tcp::Connection> connection)
      : job_(session.job),
        peer_(peer),
        remote_(std::move(remote)),
        options_(options),
        peer_limit_bytes_(peer_limit_bytes),
        connection_(std::move(connection)) {}

  // A forked child has no thread and no say in its parent's connections.
  ~TcpSender() override {
    if (connection_->in_maker()) {
      connection_->shut();
    }
  }

  void send(Message message, const void* data, const Keeper& keeper) override {
    prepare(message, data);
    connection_->writer().send(message, data, keeper);
    ++sequence_;
  }

  // There is no memory that the network card reads: what is sent is copied by the kernel.
  std::optional<Reserved> reserve(std::size_t) override { return std::nullopt; }

  void commit(Message, Reserved) override {
    throw Error("a TCP channel has no memory of its own that could be committed");
  }

  bool flush(const Deadline& deadline) override {
    try {
      return connection_->writer().wait_empty(deadline);
    } catch (const Error&) {
      connection_->check();  // knows better what happened
      throw;
    }
  }

  std::size_t pending() const noexcept override { return connection_->writer().unsent(); }

  void close() noexcept override {
    if (connection_->in_maker()) {
      connection_->writer().say_goodbye();
      connection_->pump();
    }
  }

  Info info() const override {
    return {{"kind", std::string("tcp")},
            {"remote", remote_},
            {"slot_bytes", static_cast<std::int64_t>(options_.slot_bytes)},
            {"slots", static_cast<std::int64_t>(options_.slots)}};
  }

 private:
  void prepare(Message& message, const void* data) const {
    if (!connection_->in_maker()) {
      throw Error("a forked child cannot use the channels of its parent");
    }
    connection_->check();
    message.magic = kMessageMagic;
    message.version = kMessageVersion;
    message.reserved = 0;
    message.job = job_;
    message.sequence = sequence_;
    message.offset = 0;
    message.piece_bytes = message.nbytes;
    message.has_crc = options_.crc ? 1 : 0;
    message.crc = options_.crc ? crc32c(data, static_cast<std::size_t>(message.nbytes)) : 0;
    check_message(message, job_, static_cast<std::size_t>(message.nbytes), peer_);
    if (message.nbytes > peer_limit_bytes_) {
      throw Error(describe(message) + " has " + std::to_string(message.nbytes) +
                  " bytes, more than the " + std::to_string(peer_limit_bytes_) + " that " +
                  connection_->peer_name() + " accepts");
    }
  }

  const std::uint64_t job_;
  const int peer_;
  const std::string remote_;
  const TcpOptions options_;
  const std::uint64_t peer_limit_bytes_;
  const std::shared_ptr<tcp::Connection> connection_;
  std::uint64_t sequence_ = 0;
};

void check_options(const TcpOptions& options) {
  if (options.slots < 1 || options.slots > kMostSlots || options.slot_bytes < 1) {
    throw std::invalid_argument(std::to_string(options.slots) + " slots of " +
                                std::to_string(options.slot_bytes) +
                                " bytes must be 1 to 64 slots of at least 1 byte");
  }
  if (options.silent_limit < kShortestLimit || options.silent_limit > kLongestLimit) {
    throw std::invalid_argument("silent_limit " + std::to_string(options.silent_limit.count()) +
                                " ms must be within 10 ms and a day");
  }
}

}  // namespace

std::unique_ptr<Sender> open_tcp(const Session& session, Link link, const TcpOptions& options,
                                 const Deadline& deadline, const Tick& tick) {
  check_options(options);
  tcp::Offer mine;
  mine.job = session.job;
  mine.slot_bytes = options.slot_bytes;
  mine.limit_bytes = options.limit_bytes;
  mine.slots = options.slots;
  mine.silent_limit = options.silent_limit;
  link.send_record(tcp::encode_offer(mine), {}, deadline, tick);
  const Link::Record record = link.recv_record(tcp::kOfferBytes, 0, deadline, tick);
  const tcp::Offer theirs = tcp::parse_offer(record.bytes, session.job, link.peer());
  auto connection =
      std::make_shared<tcp::Connection>(session, link.peer(), link.release(), mine, theirs);
  auto sender = std::make_unique<TcpSender>(session, link.peer(), link.remote(), options,
                                            theirs.limit_bytes, connection);
  connection->start();
  return sender;
}

}  // namespace adaptive
