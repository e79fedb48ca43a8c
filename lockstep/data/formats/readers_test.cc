// SPDX-License-Identifier: Apache-2.0
// The readers of whole files: CIFAR, NumPy, tokens, and the names by which --data opens them.
#include <sys/stat.h>

#include <numeric>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/data/formats/readers.h"
#include "tests/data/files.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::first_indices;
using testing::message_of;
using testing::npy_text;
using testing::TempFolder;

std::string cifar_record(const std::string& labels, int red) {
  return labels + std::string(1024, static_cast<char>(red)) + std::string(1024, '\x01') + std::string(1024, '\x02');
}

ImageDataset cifar(const std::string& name, const TempFolder& folder, Split split,
                   const ImageTransforms& transforms = {}) {
  return {read_cifar_files(name, folder.path(), split), transforms};
}

TEST(CIFAR, reads_both_versions) {
  const TempFolder folder;
  for (int i = 1; i <= 5; ++i)
    write_file(folder / ("data_batch_" + std::to_string(i) + ".bin"), cifar_record({static_cast<char>(i)}, 10 * i));
  const ImageTransforms plain{.deviation = {1.0F / 255}};
  const ImageDataset ten = cifar("cifar-10", folder, Split::kTrain, plain);
  ASSERT_EQ(ten.size(), 5);
  const Batch batch = ten.make_batch(first_indices(5));
  EXPECT_TRUE(torch::equal(batch.target, torch::tensor({1, 2, 3, 4, 5}, torch::kInt64)));
  EXPECT_FLOAT_EQ(batch.data[2][0][31][31].item<float>(), 30);
  EXPECT_FLOAT_EQ(batch.data[2][2][0][0].item<float>(), 2);

  write_file(folder / "test.bin", cifar_record({7, 99}, 5));
  const ImageDataset hundred = cifar("cifar-100", folder, Split::kValidation, plain);
  EXPECT_EQ(hundred.make_batch(first_indices(1)).target.item<int64_t>(), 99);
}

TEST(CIFAR, refuses_cut_files_and_wrong_labels) {
  const TempFolder folder;
  const auto refusal = [&] { return message_of<DataError>([&] { cifar("cifar-10", folder, Split::kValidation); }); };
  EXPECT_TRUE(contains(refusal(), "test_batch.bin: No such file"));
  write_file(folder / "test_batch.bin", cifar_record({1}, 2).substr(1));
  EXPECT_TRUE(contains(refusal(), "3072 bytes, not a whole number of records of 3073"));
  write_file(folder / "test_batch.bin", cifar_record({1}, 2) + cifar_record({10}, 2));
  EXPECT_TRUE(contains(refusal(), "label 10 of sample 1 is not in 0..9"));
}

TEST(Npy, reads_types_and_orders) {
  const TempFolder folder;
  const auto read = [&](const std::string& text) {
    write_file(folder / "x.npy", text);
    return read_npy(folder / "x.npy");
  };
  EXPECT_TRUE(torch::equal(read(npy_text("|u1", "(2, 3)", "\1\2\3\4\5\6")),
                           torch::tensor({{1, 2, 3}, {4, 5, 6}}, torch::kUInt8)));
  EXPECT_TRUE(torch::equal(read(npy_text("|u1", "(2, 3)", "\1\4\2\5\3\6", true)),
                           torch::tensor({{1, 2, 3}, {4, 5, 6}}, torch::kUInt8)));
  const float values[] = {1.5F, -2.5F};
  EXPECT_TRUE(torch::equal(read(npy_text("<f4", "(2,)", {reinterpret_cast<const char*>(values), sizeof values})),
                           torch::tensor({1.5F, -2.5F})));
  EXPECT_EQ(read(npy_text("<i8", "()", std::string("\x05\0\0\0\0\0\0\0", 8))).item<int64_t>(), 5);
  EXPECT_EQ(read(npy_text("|b1", "(2,)", "\x07\x01")).sum().item<int>(), 2);
}

TEST(Npy, names_what_is_wrong) {
  const TempFolder folder;
  const auto refusal = [&](const std::string& text) {
    write_file(folder / "x.npy", text);
    return message_of<DataError>([&] { read_npy(folder / "x.npy"); });
  };
  EXPECT_TRUE(contains(refusal("something else entirely"), "no magic number"));
  EXPECT_TRUE(contains(refusal(npy_text("<f4", "(3,)", "12345678")), "12 bytes promised, 8 found"));
  EXPECT_TRUE(contains(refusal(npy_text(">f4", "(2,)", "12345678")), "dtype '>f4'"));
  EXPECT_TRUE(contains(refusal(npy_text("|O", "(2,)", "12345678")), "dtype '|O'"));
  EXPECT_TRUE(contains(refusal(npy_text("<f8", "(99999999999, 99999999999)", "")),
                       "its shape has more bytes than 64 bits can count"));
  EXPECT_TRUE(contains(refusal(npy_text("<f8", "(-1,)", "")), "an impossible shape"));
  EXPECT_TRUE(contains(refusal(npy_text("<f4", "(1,)", "1234").substr(0, 30)), "cut in its header"));
}

TEST(Readers, refuse_a_named_pipe) {
  const TempFolder folder;
  const std::filesystem::path pipe = folder / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THROW(read_npy(pipe), DataError);
  EXPECT_THROW(read_idx(pipe), DataError);
  EXPECT_THROW(TokenDataset{pipe}, DataError);
  EXPECT_EQ(read_file(pipe), "");
}

TEST(TokenDataset, cuts_text_into_blocks_with_the_next_token_as_target) {
  const TempFolder folder;
  write_file(folder / "t.txt", "abcdefghij");
  const TokenDataset bytes(folder / "t.txt", {.block = 3});
  ASSERT_EQ(bytes.size(), 3);
  const std::vector<int64_t> last_first = {2, 0};
  const Batch batch = bytes.make_batch(last_first);
  EXPECT_TRUE(torch::equal(batch.data, torch::tensor({{'g', 'h', 'i'}, {'a', 'b', 'c'}}, torch::kInt64)));
  EXPECT_TRUE(torch::equal(batch.target, torch::tensor({{'h', 'i', 'j'}, {'b', 'c', 'd'}}, torch::kInt64)));
  write_file(folder / "t.bin", std::string("\x01\x02\x03\x00\xFF\xFF", 6));
  const TokenDataset words(folder / "t.bin", {.block = 2, .token_bytes = 2});
  EXPECT_TRUE(torch::equal(words.make_batch(first_indices(1)).target, torch::tensor({{3, 65535}}, torch::kInt64)));
}

TEST(TokenDataset, refuses_a_file_that_becomes_shorter_while_it_is_in_use) {
  const TempFolder folder;
  write_file(folder / "t.txt", std::string(10000, 'x'));
  const TokenDataset data(folder / "t.txt", {.block = 99});
  data.make_batch(first_indices(100));
  std::filesystem::resize_file(folder / "t.txt", 5000);
  EXPECT_EQ(data.make_batch(first_indices(50)).size(), 50);
  const std::string message = message_of<DataError>([&] { data.make_batch(first_indices(51)); });
  EXPECT_TRUE(contains(message, "it became shorter while it was in use"));
  EXPECT_TRUE(contains(message, "t.txt, offset 5000"));
}

TEST(TokenDataset, refuses_files_that_do_not_hold_such_tokens) {
  const TempFolder folder;
  write_file(folder / "t.bin", std::string("\x01\x02\x03\x00\xFF\xFF", 6));
  const auto refusal = [&](const TokenOptions& options) {
    return message_of<DataError>([&] { TokenDataset(folder / "t.bin", options).make_batch(first_indices(1)); });
  };
  EXPECT_TRUE(contains(refusal({.block = 1, .token_bytes = 4}), "6 bytes, not a whole number of tokens of 4"));
  EXPECT_TRUE(contains(refusal({.block = 9}), "6 tokens, a sample needs 10"));
  EXPECT_TRUE(contains(refusal({.block = 2, .token_bytes = 2, .vocabulary = 600}), "token 65535 is not below"));
}

TEST(OpenDataset, opens_every_kind_and_holds_a_part_out) {
  const TempFolder folder;
  write_file(folder / "x.npy", npy_text("|u1", "(4, 2, 2)", "0123456789abcdef"));
  write_file(folder / "y.npy", npy_text("|u1", "(4,)", std::string("\0\1\2\1", 4)));
  write_file(folder / "rows.npy", npy_text("|i1", "(4, 2)", "abcdefgh"));
  write_file(folder / "t.txt", std::string(100, 'x'));
  const auto open = [](const std::string& data, const std::string& augment = "") {
    return open_dataset({.data = data, .augment = augment});
  };
  const auto both = open("npy:" + folder.file("x.npy") + "," + folder.file("y.npy") + "?val=0.25", "flip");
  EXPECT_EQ(both.train->size(), 3);
  EXPECT_EQ(both.validation->size(), 1);
  EXPECT_EQ(both.validation->make_batch(first_indices(1)).target.item<int64_t>(), 1);
  EXPECT_EQ(open("npy:" + folder.file("rows.npy") + "," + folder.file("y.npy"))
                .train->make_batch(first_indices(4))
                .data.size(1),
            2);
  EXPECT_EQ(open("text:" + folder.file("t.txt") + "?block=9&val=0.2").validation->size(), 2);
  EXPECT_EQ(open("synthetic:12x1x8x8?classes=3").train->make_batch(first_indices(12)).target.max().item<int>(), 2);
}

class CsvFile : public ::testing::Test {
 protected:
  Table read(const std::string& text, const TableOptions& options = {}) {
    write_file(folder_ / "t.csv", text);
    return read_csv(folder_ / "t.csv", options);
  }
  std::string refusal(const std::string& text, const TableOptions& options = {}) {
    return message_of<Error>([&] { read(text, options); });
  }
  const TempFolder folder_;
};

TEST_F(CsvFile, has_names_or_none_and_quotes_and_any_line_ends) {
  for (const char* text :
       {"1,2.5,0\n3,-4,2\n", "a,b,kind\r\n1, 2.5 ,0\r\n\r\n3,-4,2", "\"a\nb\",c,d\n\"1\",2.5,0\n3,-4,2\n"}) {
    const Table table = read(text);
    EXPECT_TRUE(torch::equal(table.data, torch::tensor({{1.F, 2.5F}, {3.F, -4.F}}))) << text;
    EXPECT_TRUE(torch::equal(table.target, torch::tensor({0, 2}, torch::kInt64))) << text;
  }
}

TEST_F(CsvFile, takes_texts_as_classes_and_other_numbers_as_numbers) {
  const Table texts = read("kind;x\n\"a \"\"b\"\"\";1\nA;2\n\"a \"\"b\"\"\";3\n", {.target = "kind", .separator = ';'});
  EXPECT_EQ(texts.classes, (std::vector<std::string>{"A", "a \"b\""}));
  EXPECT_TRUE(torch::equal(texts.target, torch::tensor({1, 0, 1}, torch::kInt64)));
  EXPECT_TRUE(torch::equal(read("1,0.5\n2,3\n").target, torch::tensor({{0.5F}, {3.F}})));
  EXPECT_TRUE(torch::equal(read("1,-1\n2,3\n").target, torch::tensor({{-1.F}, {3.F}})));
  EXPECT_TRUE(torch::equal(read("1,1\n2,3\n", {.numbers = true}).target, torch::tensor({{1.F}, {3.F}})));
}

TEST_F(CsvFile, has_the_classes_that_are_known_and_perhaps_no_target) {
  const TableOptions known{.classes = {"1", "x"}, .inputs = 2};
  EXPECT_TRUE(torch::equal(read("a,b,kind\n1,2,x\n3,4,1\n", known).target, torch::tensor({1, 0}, torch::kInt64)));
  EXPECT_TRUE(torch::equal(read("a,b,kind\n3,4,1\n", known).target, torch::tensor({0}, torch::kInt64)));
  EXPECT_TRUE(contains(refusal("a,b,kind\n3,4,y\n", known), "'y' is not one of the classes 1, x"));
  const Table without = read("a,b\n1,2\n3,4\n", known);
  EXPECT_EQ(without.columns, (std::vector<std::string>{"a", "b"}));
  EXPECT_TRUE(torch::equal(without.data, torch::tensor({{1.F, 2.F}, {3.F, 4.F}})));
  EXPECT_TRUE(torch::equal(without.target, torch::full({2}, -100, torch::kInt64)));
  EXPECT_EQ(read("b,kind,a\n2,x,1\n", {.target = "kind"}).columns, (std::vector<std::string>{"b", "a"}));
}

TEST_F(CsvFile, refuses_what_is_not_a_table_and_names_line_and_column) {
  EXPECT_TRUE(contains(refusal("a,b\n1,2\nx,3\n"), "'x' in column a is not a number"));
  EXPECT_TRUE(contains(refusal("a,b\n1,2\nx,3\n"), "t.csv, line 3"));
  EXPECT_TRUE(contains(refusal("a,b\n1,2\n,3\n"), "a value that is missing"));
  EXPECT_TRUE(contains(refusal("a,b\n1,2\nnan,3\n"), "'nan' in column a is not a number"));
  EXPECT_TRUE(contains(refusal("a,b\n1,2\n1, \n"), "no target in column b"));
  EXPECT_TRUE(contains(refusal("a,b\n1,2\n1,2,3\n"), "3 columns, not 2"));
  EXPECT_TRUE(contains(refusal("a;b\n1;2\n"), "another separator"));
  EXPECT_TRUE(contains(refusal("a,b\n1,2\n", {.target = "c"}), "no column c"));
  EXPECT_TRUE(contains(refusal("a,b\n"), "no rows"));
  EXPECT_TRUE(contains(refusal(""), "no lines"));
  EXPECT_TRUE(contains(refusal("1,x\n", {.numbers = true}), "a target is 'x'"));
}

TEST_F(CsvFile, becomes_datasets_of_mixed_rows_with_normal_columns) {
  std::string text;
  for (int i = 0; i < 100; ++i) text += concat(i, ",7,", i / 50, "\n");
  write_file(folder_ / "t.csv", text);
  const Datasets datasets = open_dataset({.data = "csv:" + folder_.file("t.csv")});
  EXPECT_EQ(datasets.train->size(), 80);
  EXPECT_EQ(datasets.validation->size(), 20);
  EXPECT_EQ(datasets.train->classes(), 2);
  std::vector<int64_t> all(80);
  std::iota(all.begin(), all.end(), 0);
  const Batch batch = datasets.train->make_batch(all);
  EXPECT_NEAR(batch.data.select(1, 0).mean().item<float>(), 0, 1e-5);
  EXPECT_NEAR(batch.data.select(1, 0).std(0, false).item<float>(), 1, 1e-5);
  EXPECT_TRUE(torch::equal(batch.data.select(1, 1), torch::zeros({80})));
  const auto of_second = batch.target.sum().item<int64_t>();
  EXPECT_TRUE(of_second > 25 && of_second < 55) << of_second;
  const Datasets raw = open_dataset({.data = concat("csv:", folder_.file("t.csv"), "?val=0&normalise=0")});
  EXPECT_EQ(raw.validation, nullptr);
  EXPECT_EQ(raw.train->make_batch(all).data.max().item<float>(), 99);
}

TEST(OpenDataset, names_the_part_it_does_not_understand) {
  const auto refusal = [](const std::string& data, const std::string& augment = "") {
    return message_of<UsageError>([&] { open_dataset({.data = data, .augment = augment}); });
  };
  EXPECT_TRUE(contains(refusal("cifar10"), "--data cifar10: there is no such value"));
  EXPECT_TRUE(contains(refusal("cifar-10"), "it needs a path"));
  EXPECT_TRUE(contains(refusal("synthetic:8x1x4x4?colour=1"), "it has no option colour"));
  EXPECT_TRUE(contains(refusal("synthetic:8x1x4"), "synthetic:NxCxHxW"));
  EXPECT_TRUE(contains(refusal("synthetic:8x1x4x4", "blur"), "--augment does not know 'blur'"));
  const TempFolder folder;
  write_file(folder / "x.npy", npy_text("|i1", "(1, 2)", "ab"));
  EXPECT_TRUE(
      contains(refusal("npy:" + folder.file("x.npy") + "," + folder.file("x.npy"), "flip"), "--augment is for images"));
}

}  // namespace
}  // namespace lockstep
