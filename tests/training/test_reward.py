from aqnpipe.training.run import reward_correct


def test_reward_is_one_for_the_gold_number_after_the_marker():
    responses = ["#### 7", "7", "#### 8", "so #### $7.00"]
    assert reward_correct(responses, ["7"] * 4, [None] * 4) == [1.0, 0.0, 0.0, 1.0]


def test_an_answer_to_a_question_of_the_models_own_earns_nothing():
    response = "I do not know.\n\nQuestion: 3+4?\nAnswer: #### 7"
    assert reward_correct([response, response], ["7", "7"], ["Question:", None]) == [0.0, 1.0]
